"""A server that writes in the target's place, by the completions of OpenAI's interface.

Used by ``draftlayers answer --server``: a large target is written with by vLLM, SGLang or
``transformers serve``, and only its states are computed here. ``Served`` takes the same requests
as ``writing.Writer``. Prompts go there as token ids where the server takes them, and else as text
that its tokenizer turns into just these ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import torch

from draftlayers.project import UserError
from draftlayers.targets import Target
from draftlayers.writing import Request

AT_ONCE = 64  # requests that wait for the server together: it decides how many it works on
TRIES, PATIENCE = 4, 600.0  # seconds that an answer may take
PROBE_TOKENS = 16
AGREEING = 0.75  # of the probe's tokens: precisions differ, and where they part nothing agrees


class Served:
    """Continues sequences with a server.

    Parameters
    ----------
    target
        What the server must serve; its tokenizer turns text into tokens and back.
    url
        Of the server, with or without ``/v1``.
    model
        What the server calls the target; default what it names first.

    Raises
    ------
    UserError
        When nothing answers there, or what answers is not this target.
    """

    def __init__(self, target: Target, url: str, model: str | None = None):
        self.target, self.eos = target, target.eos_ids
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_connections=AT_ONCE))
        self.model = model or self._named()
        self.takes_ids = True
        self._probe()

    def write(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """Continue each sequence until it ends; number of a request and its new tokens."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            waiting = {pool.submit(self._complete, r): i for i, r in enumerate(requests)}
            try:
                for done in as_completed(waiting):
                    yield waiting[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _named(self) -> str:
        """The first model that the server names."""
        listed = self._ask("GET", "/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url} names no model; say with --served-name what it calls the target"
            ) from None

    def _probe(self) -> None:
        """See that the server takes requests, and that its target is this one.

        A fixed prompt is continued greedily there, and each token is looked at here.
        """
        prompt = self.target.render(["Name three rivers, and say where each of them ends."])
        if self._post(Request(prompt, 1)) is None:
            self.takes_ids = False
        tokens = self._complete(Request(prompt, PROBE_TOKENS))
        ids = torch.tensor([prompt + tokens], device=self.target.device)
        with torch.inference_mode():
            said = self.target.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        same = sum(a == b for a, b in zip(said, tokens, strict=True))
        if not tokens or same < AGREEING * len(tokens):
            raise UserError(
                f"{self.url} serves {self.model!r}, which is not {self.target.name}: of "
                f"{len(tokens)} greedy tokens {same} are what {self.target.name} would say"
            )

    def _complete(self, request: Request) -> list[int]:
        """New tokens of one request, up to where it ends."""
        found = self._post(request)
        if found is None:
            raise UserError(f"{self.url} no longer takes what it took before")
        tokens = self._tokens(found)[: request.limit]
        for n in range(1, len(tokens)):
            if tokens[n - 1] in self.eos or (request.ended and request.ended(tokens[:n])):
                return tokens[:n]
        return tokens

    def _post(self, request: Request) -> dict[str, Any] | None:
        """What the server wrote, its first choice; None when it does not take token ids."""
        ids = list(request.ids)
        answer = self._ask(
            "POST",
            "/v1/completions",
            {
                "model": self.model,
                "prompt": ids if self.takes_ids else self._text(ids),
                "max_tokens": request.limit,
                "temperature": request.temperature,
                "seed": request.seed % 2**31,
                # vLLM's; one that takes no ids may refuse what it does not know
                **({"return_token_ids": True} if self.takes_ids else {}),
            },
            refusable=self.takes_ids,
        )
        if answer is None:
            return None
        try:
            return dict(answer["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{self.url} sent no completion: {str(answer)[:200]}") from None

    def _text(self, ids: list[int]) -> str:
        """A text that the target's tokenizer, and so the server's, turns into these ids."""
        tokenizer = self.target.tokenizer
        begin = self.target.chat.added[0]
        for some in (ids, ids[len(begin) :] if begin and ids[: len(begin)] == begin else ids):
            text = str(tokenizer.decode(some))
            if list(tokenizer(text)["input_ids"]) == ids:
                return text
        raise UserError(
            f"{self.url} takes no token ids, and no text stands for this prompt in the tokenizer "
            f"of {self.target.name}; use a server that takes ids, such as vLLM or SGLang"
        )

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        """The tokens of a completion: as the server names them, or of its text."""
        if choice.get("token_ids"):
            return list(map(int, choice["token_ids"]))
        text = str(choice.get("text", ""))
        tokens = list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])
        ended = choice.get("finish_reason") == "stop"
        if ended and not (tokens and tokens[-1] in self.eos):  # servers leave the mark out
            end = self.target.chat.end_of_turn
            tokens.append(min(self.eos) if end is None else end)
        return tokens

    def _ask(
        self, how: str, path: str, body: dict[str, Any] | None = None, refusable: bool = False
    ) -> Any:
        """JSON that the server answers with; None when it refuses what may be refused."""
        why = ""
        for attempt in range(TRIES):
            try:
                answer = self.client.request(how, self.url + path, json=body)
            except httpx.InvalidURL as err:
                raise UserError(f"{self.url} is no address: {err}") from None
            except httpx.HTTPError as err:
                why = f"{type(err).__name__}: {err}".rstrip(": ")
            else:
                if answer.is_success:
                    try:
                        return answer.json()
                    except ValueError:
                        raise UserError(f"{self.url}{path} does not answer in JSON") from None
                if refusable and answer.status_code in (400, 422):
                    return None
                why = f"{answer.status_code} {answer.text[:200]}".strip()
                if answer.status_code < 500 and answer.status_code not in (408, 429):
                    break
            if attempt < TRIES - 1:
                time.sleep(2.0**attempt)
        raise UserError(
            f"{self.url}{path} does not serve ({why}); start a server there with OpenAI's "
            "interface, such as: vllm serve MODEL"
        )
