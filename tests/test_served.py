"""A server writes what the target would: `transformers serve`, and others by their habits."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch

from draftlayers import asking, corpus, served
from draftlayers.corpus import enlarge
from draftlayers.project import UserError
from draftlayers.runs import Run
from draftlayers.served import Served
from draftlayers.spec import RunSpec
from draftlayers.targets import load_target, tiny_target
from draftlayers.writing import Request, Writer

WORD = re.compile(" [a-z]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small checkpoint that says whole words only, so that its text has one way to be tokens."""
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    target = tiny_target(n_layers=3, tie_word_embeddings=False)
    words = [t for t in range(target.vocab_size) if WORD.fullmatch(target.tokenizer.decode([t]))]
    with torch.no_grad():
        output = target.output_matrix.weight
        said = output[words].clone()
        output.zero_()
        output[words] = said
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder))


@pytest.fixture(scope="module")
def address(folder):
    """Where `transformers serve` serves the checkpoint."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder),
               "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
               "--dtype", "float32"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail(process.stdout.read().decode()[-2000:])
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_transformers_serve_writes_what_the_target_does(target, address):
    server = Served(target, address + "/v1")
    assert not server.takes_ids  # it takes text only
    prompts = [target.render([text]) for text in ("Name two rivers.", "What is 7 + 5?", "Hello!")]
    requests = [Request(ids, limit) for ids, limit in zip(prompts, (9, 12, 5), strict=True)]
    assert dict(server.write(requests)) == dict(Writer(target).write(requests))


def test_questions_and_answers_of_a_server(target, address, tmp_path, monkeypatch):
    """As many as the target would write, and kept like its own."""
    monkeypatch.setattr(asking, "ROUND", 6)
    monkeypatch.setattr(corpus, "ROUND", 6)
    monkeypatch.setattr(asking, "LIMIT", 8)
    monkeypatch.setattr(asking, "_text", lambda target, words, ids: f"{words} {ids}")
    run = Run(RunSpec.make(str(target.name), "smoke"), tmp_path)
    asked, answers = enlarge(target, run, 60, writer=Served(target, address))
    assert sum(len(a.tokens) for a in answers) >= 60
    greedy = next(a for a in answers if a.temperature == 0)
    prompt = next(p for p in asked.prompts if p.id == greedy.id)
    again = dict(Writer(target).write([Request(target.render(prompt.turns), greedy.limit)]))
    assert again[0] == greedy.tokens
    said: list[str] = []
    assert enlarge(target, run, 60, say=said.append) == (asked, answers) and not said


def spoken(target, monkeypatch, answer):
    """A server that answers as told: `answer` is given each request's path and body."""

    def handle(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        return answer(body)

    client = httpx.Client(transport=httpx.MockTransport(handle))
    monkeypatch.setattr(served.httpx, "Client", lambda **settings: client)
    monkeypatch.setattr(served.time, "sleep", lambda seconds: None)
    return Served(target, "http://there/")


def continued(target, body):
    ids = body["prompt"]
    return dict(Writer(target).write([Request(ids, body["max_tokens"])]))[0]


def choice(**values):
    return httpx.Response(200, json={"choices": [values]})


def test_token_ids_are_sent_and_taken_where_the_server_knows_them(target, monkeypatch):
    server = spoken(target, monkeypatch, lambda b: choice(token_ids=continued(target, b), text="?"))
    assert server.takes_ids and server.model == "m"
    requests = [Request(target.render(["Hello!"]), 7)]
    assert dict(server.write(requests)) == dict(Writer(target).write(requests))


def test_what_ended_gets_its_end_back(target, monkeypatch):
    def answer(body):
        tokens = continued(target, body)
        if body["max_tokens"] == 9:  # not the probe
            return choice(text="Yes, they do.", finish_reason="stop")
        return choice(token_ids=tokens)

    server = spoken(target, monkeypatch, answer)
    ((_, tokens),) = server.write([Request(target.render(["Do they?"]), 9)])
    assert target.tokenizer.decode(tokens[:-1]) == "Yes, they do."
    assert tokens[-1] == target.chat.end_of_turn and tokens[-1] in target.eos_ids


def test_a_request_ends_where_its_owner_says(target, monkeypatch):
    server = spoken(target, monkeypatch, lambda b: choice(token_ids=continued(target, b)))
    whole = dict(server.write([Request(target.render(["Hello!"]), 7)]))[0]
    ended = Request(target.render(["Hello!"]), 7, ended=lambda tokens: len(tokens) == 3)
    assert dict(server.write([ended]))[0] == whole[:3]


def test_another_model_is_found_out(target, monkeypatch):
    other = tiny_target(seed=5, n_layers=3)
    with pytest.raises(UserError, match=r"serves 'm', which is not .* of 16 greedy tokens"):
        spoken(target, monkeypatch, lambda b: choice(token_ids=continued(other, b)))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda b: httpx.Response(500, text="out of memory"), "does not serve .500 out of memory"),
        (lambda b: httpx.Response(404, text="no such model"), "does not serve .404 no such model"),
        (lambda b: httpx.Response(200, text="<html>"), "does not answer in JSON"),
        (lambda b: httpx.Response(200, json={"choices": []}), "sent no completion"),
    ],
)
def test_what_a_server_does_wrong_is_said(target, monkeypatch, answer, message):
    with pytest.raises(UserError, match=message):
        spoken(target, monkeypatch, answer)


def test_a_server_that_is_busy_is_asked_again(target, monkeypatch):
    refusals = iter([503, 429, 503])

    def answer(body):
        if status := next(refusals, None):
            return httpx.Response(status)
        return choice(token_ids=continued(target, body))

    assert spoken(target, monkeypatch, answer).takes_ids


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "there", "http://["])
def test_where_nothing_serves_is_said_at_once(target, url, monkeypatch):
    monkeypatch.setattr(served.time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"does not serve|is no address"):
        Served(target, url)
