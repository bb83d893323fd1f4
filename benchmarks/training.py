"""How fast heads are trained, against the arithmetic limit of the machine and against speculators.

    python benchmarks/training.py [--json -] [--updates 8] [--rounds 3]

Synthetic conversations in the sizes of the default target (SmolLM2-135M) and its default head go
through the very update that ``train_head`` makes. ``fraction_of_gemm`` is the arithmetic the update
cannot do without (matrix products, forward and backward, at the positions that count), divided by
its time and by the rate of the machine's best large matrix product in float32, measured in between.
Where training multiplies in bfloat16 (``precision``), it can exceed one, and
``fraction_of_bfloat16_gemm`` holds the same against the best product in bfloat16.
``vs_speculators`` is the ratio of answer tokens per second to those of ``speculators``'
Eagle3DraftModel with its eager attention, the same batches, sizes, steps, precision and optimiser;
null where it is not installed (``pip install --no-deps speculators hs-connectors`` and
``pip install openai datasets``).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from _record import write

from draftlayers.device import dtype_name
from draftlayers.examples import TOP, Examples, TrainingData
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.spec import PROFILES
from draftlayers.training import Trainer, TrainingSettings
from draftlayers.ttt import STEP_WEIGHT, autocast, precision

VOCAB = 49152
PROFILE = PROFILES["full"]
SETTINGS = TrainingSettings(
    epochs=1.0,
    batch_tokens=PROFILE["batch_tokens"],
    learning_rate=1e-4,
    ttt_steps=PROFILE["ttt_steps"],
    start="random",
)
CONFIG = HeadConfig(
    target="synthetic",
    n_layers=30,
    layers=(2, 15, 27),
    d_model=576,
    vocab_size=VOCAB,
    draft_vocab_size=PROFILE["draft_vocab"],
    intermediate_size=1536,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 100000.0},
    max_positions=8192,
)


def synthetic_data(conversations: int) -> TrainingData:
    """Conversations of 40 to 180 prompt and 60 to 128 answer tokens, with random states."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = torch.randperm(VOCAB, generator=generator)[: CONFIG.draft_vocab_size].sort().values
    prompts = torch.randint(40, 180, (conversations,), generator=generator)
    answers = torch.randint(60, 129, (conversations,), generator=generator)
    n = int((prompts + answers).sum())
    sequence = torch.repeat_interleave(torch.arange(conversations), prompts + answers).int()
    flags = [
        torch.tensor([False] * (p - 1) + [True] * a + [False])
        for p, a in zip(prompts.tolist(), answers.tolist(), strict=True)
    ]
    picks = torch.randint(CONFIG.draft_vocab_size, (n, TOP), generator=generator)
    top = torch.randn(n, TOP, generator=generator).sort(-1, descending=True).values
    states = torch.randn(n, CONFIG.d_model, generator=generator).bfloat16()
    top_ids, top_logprobs = vocabulary[picks].int(), top.log_softmax(-1).half()
    store = SimpleNamespace(
        boundaries=CONFIG.layers,
        meta={
            "sequence": sequence,
            "answer": torch.cat(flags),
            "token": torch.randint(VOCAB, (n,), generator=generator).int(),
        },
        distributions=lambda rows: (top_ids[rows], top_logprobs[rows]),
        gather=lambda rows, boundaries: states[rows].expand(len(boundaries), -1, -1),
    )
    ids = torch.arange(conversations)
    return TrainingData(store, ids[:-4], ids[-4:], vocabulary)


def necessary_flops(data: Examples, chosen: list[int], steps: int) -> float:
    """Multiply-adds, times two, of the matrix products that an update cannot do without.

    A linear layer costs one product forward and two backward; ``fc`` has no gradient to its
    input. Attention is counted exactly causal.
    """
    c = CONFIG
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = 2 * c.d_model * q + q * c.d_model + 3 * c.d_model * c.intermediate_size
    keys = 2 * c.d_model * 2 * kv
    total = 0.0
    for i in chosen:
        rows = data.length[i] - 1
        batch = data.batch([i], steps)
        active = len(batch.active)
        seen = int(batch.mask[0, :active].sum())
        total += rows * (2 * c.k * c.d_model * c.d_model + 3 * keys)
        total += active * 3 * (steps * layer + (steps - 1) * keys)
        total += 3 * 2 * q * sum(seen + active * s for s in range(steps))
        total += 3 * c.d_model * c.draft_vocab_size * int(batch.loss_mask.sum())
    return 2 * total


def gemm_rate(dtype: torch.dtype, seconds: float = 0.6) -> float:
    """Best rate of large matrix products of a precision on this machine now, in FLOP/s."""
    best = 0.0
    for shape in ((2048, 2048, 2048), (1024, 576, 8000), (1024, 8000, 576)):
        m, k, n = shape
        a, b = (torch.randn(x, y).to(dtype) for x, y in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=dtype)
        torch.mm(a, b, out=out)
        started = time.perf_counter()
        while time.perf_counter() - started < seconds / 3:
            before = time.perf_counter()
            torch.mm(a, b, out=out)
            best = max(best, 2 * m * k * n / (time.perf_counter() - before))
    return best


def speculators_update(head: DraftHead, data: Examples) -> Callable[[list[int]], None]:
    """An update of speculators' head on the same conversations, packed as it packs them.

    Raises
    ------
    ImportError
        When speculators is not installed.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    c = CONFIG
    layer = LlamaConfig(
        hidden_size=c.d_model, intermediate_size=c.intermediate_size, num_hidden_layers=1,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        vocab_size=VOCAB, rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope),
        max_position_embeddings=c.max_positions, attn_implementation="eager",
    )  # fmt: skip
    proposal = GreedyTokenProposalConfig(speculative_tokens=SETTINGS.ttt_steps)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=c.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(c.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    weights = {k.replace("midlayer.", "layers.0."): v for k, v in head.state_dict().items()}
    model.load_state_dict(weights, strict=False)
    model.verifier_lm_head.weight.requires_grad_(False)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)
    loss_config = resolve_loss_config("kl_div", "eager")

    def update(chosen: list[int]) -> None:
        rows = torch.cat(
            [torch.arange(data.first[i], data.first[i] + data.length[i] - 1) for i in chosen]
        )
        documents = torch.cat([torch.full((data.length[i] - 1,), n) for n, i in enumerate(chosen)])
        optimizer.zero_grad(set_to_none=False)
        with autocast(head.fc.weight.device):
            _, loss, _ = model(
                hidden_states=data.states(rows)[None].float(),
                input_ids=data.token[rows + 1][None],
                document_ids=documents[None],
                loss_mask=data.trainable[rows + 1][None],
                verifier_last_hidden_states=data.states(rows + 1)[None, :, : c.d_model].float(),
                ttt_steps=SETTINGS.ttt_steps,
                ttt_step_loss_decay=STEP_WEIGHT,
                loss_config=loss_config,
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, SETTINGS.clip)
        optimizer.step()

    return update


def measure(updates: int, rounds: int) -> dict[str, Any]:
    """Alternate rounds of ours, the machine's limit and speculators; medians over rounds."""
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic_data(40 * updates)
        embedding = torch.randn(VOCAB, CONFIG.d_model)
        model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=embedding))
        target = SimpleNamespace(model=model)
        trainer = Trainer(CONFIG, data, target, SETTINGS, 0, Path(folder), causes={})
        if trainer.head.fc.weight.device.type != "cpu":
            raise SystemExit("this benchmark measures the CPU; set CUDA_VISIBLE_DEVICES=''")
        try:
            theirs = speculators_update(trainer.head, trainer.data)
        except ImportError:
            theirs = None
        trainer.step()
        if theirs:
            theirs(trainer.batches[0])
        ours = precision(embedding.device)
        limits: dict[torch.dtype, list[float]] = {}
        fractions: dict[torch.dtype, list[float]] = {}
        ours_rates, ratios = [], []
        for _ in range(rounds):
            batches = trainer.batches[trainer.update : trainer.update + updates]
            flops = sum(necessary_flops(trainer.data, b, SETTINGS.ttt_steps) for b in batches)
            rates = {dtype: [gemm_rate(dtype)] for dtype in (torch.float32, ours)}
            before, started = trainer.tokens, time.perf_counter()
            for _ in batches:
                trainer.step()
            seconds = time.perf_counter() - started
            for dtype, values in rates.items():
                values.append(gemm_rate(dtype))
                limits.setdefault(dtype, []).append(statistics.mean(values))
            tokens = trainer.tokens - before
            ours_rates.append(tokens / seconds)
            for dtype, values in limits.items():
                fractions.setdefault(dtype, []).append(flops / seconds / values[-1])
            if theirs:
                few = batches[: max(1, updates // 4)]
                started = time.perf_counter()
                for batch in few:
                    theirs(batch)
                other = sum(trainer.data.answer_tokens[i] for b in few for i in b)
                ratios.append(tokens / seconds / (other / (time.perf_counter() - started)))
            print(f"{ours_rates[-1]:.0f} answer tokens/s", file=sys.stderr)
    return {
        "tokens_per_s": round(statistics.median(ours_rates), 1),
        "precision": dtype_name(ours),
        "gemm_gflops": {
            dtype_name(dtype): round(statistics.median(values) / 1e9, 1)
            for dtype, values in limits.items()
        },
        "fraction_of_gemm": round(statistics.median(fractions[torch.float32]), 3),
        "fraction_of_bfloat16_gemm": round(statistics.median(fractions[torch.bfloat16]), 3)
        if torch.bfloat16 in fractions
        else None,
        "vs_speculators": round(statistics.median(ratios), 2) if ratios else None,
        "ttt_steps": SETTINGS.ttt_steps,
        "batch_tokens": SETTINGS.batch_tokens,
        "draft_vocab": CONFIG.draft_vocab_size,
    }


def main(
    json_path: Annotated[str, typer.Option("--json", help="File, or - for standard output.")] = "-",
    updates: Annotated[int, typer.Option(help="Updates in a round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.")] = 3,
) -> None:
    """Measure training speed on this CPU."""
    write(measure(updates, rounds), json_path)


if __name__ == "__main__":
    typer.run(main)
