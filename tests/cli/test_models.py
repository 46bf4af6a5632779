"""``publish`` and ``generate`` with a tiny model, and how texts become prompts. The daemon is a scripted one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pkv.cli.options import parse_dtype, parse_expiry, read_text
from p2pkv.client.sync import Client
from p2pkv.connectors.hf import api as hf
from p2pkv.connectors.hf.checkpoint import greedy, load_checkpoint
from p2pkv.errors import ModelUnsupportedError, UsageError
from p2pkv.formats.cid import Cid
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.tensors import Dtype
from p2pkv.keys import encode_tokens
from tests.cli.checkpoint import BOS, save_checkpoint
from tests.cli.conftest import Cli
from tests.cli.daemon import FakeDaemon, file_progress
from tests.support.staged import staged_block, staged_pack, staged_records

TEXT = "Call me Ishmael. Some years ago - never mind how long precisely. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


# --- publish -----------------------------------------------------------------------------------------------------------


class _Adopting(FakeDaemon):
    """Keeps the envelope that was staged, as a daemon would, before its publisher clears the folder."""

    def staged(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Envelope]:
        seen: list[Envelope] = []
        send = Client._report

        def call(client: Client, request: Any, on_event: Any) -> dict[str, Any]:
            if request.path == "/v1/publish":
                name, manifest = request.body["staging"], Cid.parse(request.body["manifest"])
                seen.append(Envelope.decode(staged_block(home, name, manifest)))
                assert manifest in staged_records(home, name)
                assert list(staged_pack(home, name).parent.iterdir()) == [staged_pack(home, name)]
            return send(client, request, on_event)

        monkeypatch.setattr(Client, "_report", call)
        return seen


def test_publish_signs_the_text_and_hands_it_to_the_daemon(
    cli: Cli, home: Path, folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did = cli("keygen", "--json").document["did"]
    with _Adopting(home).running() as daemon:
        assert isinstance(daemon, _Adopting)
        daemon.events = [file_progress(50, 100, "verifying"), {"event": "report", "manifest": "", "segments": 2}]
        seen = daemon.staged(home, monkeypatch)
        options = ("--licence", "CC0-1.0", "--expires", "30d", "--trust", "--dtype", "fp32")
        made = cli("publish", folder, text_file, *options, "--json")
        assert (made.status, made.err) == (0, "")
        told = cli("publish", folder, text_file, "--name", "my model")
    document = made.document
    manifest = seen[0].open()
    assert Cid.parse(document["manifest"]) == seen[0].cid
    assert (document["publisher"], document["tokens"], document["dtype"], document["trusted"]) == (
        did,
        len(TEXT),
        "fp32",
        True,
    )
    assert (manifest.publisher, manifest.licence, manifest.model_name, manifest.dtype) == (did, "CC0-1.0", "tiny", Dtype.FP32)
    assert manifest.expires is not None
    assert manifest.expires == document["expires"]
    assert abs(manifest.expires - time.time() - 30 * 86_400) < 60
    assert manifest.tokens.inline == encode_tokens(load_checkpoint(folder, Dtype.FP32).document_ids(TEXT))
    assert [rule["publisher"] for rule in cli("trust", "list", "--json").document["rules"]] == [did]
    assert seen[1].open().model_name == "my model"
    assert seen[1].open().dtype is Dtype.BF16
    assert told.out.splitlines()[0] == f"manifest   {seen[1].cid}"
    assert "verifying: 50 %, 50 B of 100 B" in told.err.splitlines()
    assert f"p2pkv trust add {did}" in told.err


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        ([], "key.unreadable", 2),
        (["--expires", "yesterday"], "usage", 2),
        (["--expires", "2001-01-01"], "usage", 2),
        (["--device", "toaster"], "usage", 2),
    ],
)
def test_publish_refuses_what_cannot_be(
    cli: Cli, daemon: FakeDaemon, folder: Path, text_file: Path, arguments: list[str], code: str, status: int
) -> None:
    if arguments:
        cli("keygen")
    told = cli("publish", folder, text_file, *arguments, "--json")
    assert (told.status, told.error["code"]) == (status, code)
    assert ("POST", "/v1/publish") not in [request[:2] for request in daemon.requests]


def test_publish_without_a_daemon_fails_before_it_loads_the_model(cli: Cli, text_file: Path, tmp_path: Path) -> None:
    cli("keygen")
    told = cli("publish", tmp_path / "no-model", text_file, "--json")
    assert (told.status, told.error["code"]) == (4, "daemon.unreachable")


# --- generate ----------------------------------------------------------------------------------------------------------


def test_generate_answers_without_a_daemon_and_says_why_nothing_was_loaded(cli: Cli, folder: Path, text_file: Path) -> None:
    question = ("--prompt-file", text_file, "--question", "Who?", "--max-new-tokens", 5, "--dtype", "fp32")
    made = cli("generate", folder, *question, "--json")
    assert made.status == 0
    document = made.document
    assert document["report"]["hit_tokens"] == 0
    assert "daemon.unreachable" in document["report"]["miss"]
    assert document["report"]["bytes_fetched"] == 0
    assert 0 < document["time_to_first_token_s"] <= document["took_s"]

    checkpoint = load_checkpoint(folder, Dtype.FP32)
    ids = [*checkpoint.document_ids(TEXT), *checkpoint.question_ids("Who?")]
    cache = hf.open_cache(checkpoint.model)
    steps = hf.canonical_steps(len(ids), shared=len(TEXT))
    hf.prefill(checkpoint.model, ids, cache, steps[:-1])
    assert document["token_ids"] == list(greedy(checkpoint.model, ids, cache, 5))
    assert document["answer"] == checkpoint.text(document["token_ids"])

    told = cli("generate", folder, *question)
    assert told.status == 0
    assert "no hit for " in told.err
    assert "first token after" in told.err


def test_generate_tells_the_daemon_where_the_document_ends(
    cli: Cli, daemon: FakeDaemon, folder: Path, text_file: Path
) -> None:
    refusal = {"manifest": "bafy", "code": "trust.untrusted", "message": "x is not trusted", "advice": "Trust x."}
    daemon.events = [{"event": "report", "refusals": [refusal]}]
    question = ("--prompt-file", text_file, "--question", "Who?", "--max-new-tokens", 1)
    told = cli("generate", folder, *question)
    assert told.status == 0
    assert "  not used: bafy: x is not trusted [trust.untrusted] Trust x." in told.err.splitlines()
    cli("generate", folder, *question, "--no-shared")
    first, second = (body for method, path, body in daemon.requests if path == "/v1/fetch")
    assert first["token_ids"][: len(TEXT)] == load_checkpoint(folder, Dtype.BF16).document_ids(TEXT)
    assert (first["shared"], second["shared"]) == (len(TEXT), None)
    assert first["dtype"] == "bf16"


def test_generate_asks_for_a_quorum(cli: Cli, daemon: FakeDaemon, folder: Path, text_file: Path) -> None:
    daemon.events = [{"event": "report"}]
    question = ("--prompt-file", text_file, "--question", "Who?", "--max-new-tokens", 1)
    assert cli("generate", folder, *question, "--verify", "quorum=3").status == 0
    (body,) = (body for method, path, body in daemon.requests if path == "/v1/fetch")
    assert body["quorum"] == 3


def test_generate_refuses_a_level_of_verification_that_is_none(cli: Cli, text_file: Path) -> None:
    told = cli("generate", "no/model", "--prompt-file", text_file, "--question", "?", "--verify", "sample=0", "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
    assert "sample=0" in told.error["message"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", None])
def test_generate_refuses_a_file_that_is_no_text(cli: Cli, folder: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    told = cli("generate", folder, "--prompt-file", path, "--question", "?", "--json")
    assert (told.status, told.error["code"]) == (2, "usage")


def test_generate_refuses_more_tokens_than_the_model_was_made_for(cli: Cli, folder: Path, text_file: Path) -> None:
    told = cli("generate", folder, "--prompt-file", text_file, "--question", "?", "--max-new-tokens", 1000, "--json")
    assert (told.status, told.error["code"]) == (2, "usage")
    assert "1024" in told.error["message"]


# --- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_document_has_its_own_ids_at_the_front_of_every_prompt(folder: Path) -> None:
    checkpoint = load_checkpoint(folder, Dtype.FP32)
    text = "naïve <s> text\r\nwith lines\n"
    ids = [*checkpoint.document_ids(text), *checkpoint.question_ids("Why?")]
    assert ids[: len(checkpoint.document_ids(text))] == checkpoint.document_ids(text)
    assert BOS not in checkpoint.document_ids("plain")
    assert checkpoint.text(checkpoint.question_ids("Why?")) == "\n\nQuestion: Why?\nAnswer:"
    with pytest.raises(UsageError):
        checkpoint.document_ids("")


def test_bos_stands_in_front_of_the_document_only_and_only_where_the_tokenizer_puts_it(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(save_checkpoint(tmp_path / "bos", bos=True), Dtype.FP32)
    assert checkpoint.document_ids("ab")[0] == BOS
    assert len(checkpoint.document_ids("ab")) == 3
    assert BOS not in checkpoint.question_ids("Why?")


@pytest.mark.parametrize("dtype", Dtype)
def test_a_checkpoint_is_loaded_ready_to_use(folder: Path, dtype: Dtype, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_checkpoint(folder, dtype).model
    assert hf.geometry(model).dtype is dtype
    assert not model.training
    assert capfd.readouterr().err == ""


def test_greedy_stops_at_an_end_token_and_at_the_count(folder: Path) -> None:
    model = load_checkpoint(folder, Dtype.FP32).model
    prompt = list(range(10))

    def generate(count: int) -> list[int]:
        return list(greedy(model, prompt, hf.open_cache(model), count))

    free = generate(6)
    assert len(free) == 6
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [free[2], 999]
    assert generate(6) == free[: free.index(free[2])]


@pytest.mark.parametrize("damage", ["no folder", "no weights", "no tokenizer", "a tensor missing", "cut off"])
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    weights = folder / "model.safetensors"
    if damage != "no folder":
        save_checkpoint(folder)
    match damage:
        case "no weights":
            weights.unlink()
        case "no tokenizer":
            for path in folder.glob("tokenizer*"):
                path.unlink()
        case "a tensor missing":
            tensors = load_file(weights)
            del tensors["model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, weights, metadata={"format": "pt"})
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-100])
    expected = UsageError if damage == "no folder" else ModelUnsupportedError
    with pytest.raises(expected) as told:
        load_checkpoint(folder, Dtype.FP32)
    assert str(folder) in told.value.message
    assert torch.is_grad_enabled()


# --- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12h", 43_200),
        ("30d", 30 * 86_400),
        ("2w", 14 * 86_400),
        ("1970-01-03", 2 * 86_400),
        ("1970-01-03T00:00:00+01:00", 2 * 86_400 - 3600),
    ],
)
def test_times_to_expire(text: str, expected: int) -> None:
    assert parse_expiry(text, 0.0) == expected


@pytest.mark.parametrize("text", ["", "30", "0d", "-1d", "soon", "9999999d", "1969-01-01", "2027-13-01"])
def test_what_is_no_time_to_expire(text: str) -> None:
    with pytest.raises(UsageError):
        parse_expiry(text, 0.0)


def test_dtypes_have_this_projects_names_and_torchs() -> None:
    assert [parse_dtype(name) for name in ("bf16", "bfloat16", "float32", "fp16")] == [
        Dtype.BF16,
        Dtype.BF16,
        Dtype.FP32,
        Dtype.FP16,
    ]


def test_a_text_is_read_byte_for_byte_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\u2028é".encode())
    assert read_text(path) == "a\r\nb\u2028é"
    monkeypatch.setattr("p2pkv.cli.options.MAX_TEXT_FILE_BYTES", 4)
    with pytest.raises(UsageError, match="exceeds 4 bytes"):
        read_text(path)
