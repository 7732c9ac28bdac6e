"""All commands: wrong input gives one sentence and exit code 2, and is not executed; JSON, completion, help."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from support.commands import run
from typer.testing import CliRunner

from fusion_attention.cli import app
from fusion_attention.refusals.call_parser import LONGEST

Q = "query=f16[1,4,2,64]"
CALL = "npu_fusion_attention(f16[1,4,2,64], f16[1,4,2,64], f16[1,4,2,64], 2, {})"


def refused(*arguments: str, stdin: str = "") -> str:
    """Run a command with wrong input, assert exit code 2, and return its one line of stderr."""
    code, out, err = run(*arguments, stdin=stdin)
    assert code == 2, (out, err)
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"fusion-attention {arguments[0]}: ")
    assert "Traceback" not in line
    assert len(line) < 1100
    return line


# ------------------------------------------------------------------------------------------------------------ explain

EXECUTES = [
    "__import__('os').system('touch {path}')",
    "open('{path}', 'w')",
    'exec(\'open("{path}", "w")\')',
    CALL.format("open('{path}', 'w').name"),
    CALL.format("[c for c in ().__class__.__base__.__subclasses__()]"),
    CALL.format("(lambda: open('{path}', 'w'))()"),
    CALL.format("x := open('{path}', 'w')"),
    CALL.format('f\'{{open("{path}", "w")}}\''),
    CALL.format("torch.load('{path}')"),
    CALL.format("torch.ones(3).numpy().tofile('{path}')"),
    CALL.format("torch.ones(3).share_memory_()"),
    CALL.format("f16[2].__class__"),
    CALL.format("torch.tensor([1]).storage().filename"),
    CALL.format("Band.__init__.__globals__['__builtins__']"),
    CALL.format("Band._load('{path}')"),
    CALL.format("'{{0.__class__}}'.format(1)"),
    CALL.format("f16[2].apply_(print)"),
    CALL.format("f16[2].__reduce_ex__(2)"),
    CALL.format("f16[2].__getattribute__('shape')"),
    CALL.format("f16[2].to(open('{path}', 'w'))"),
    "import os\nos.system('touch {path}')",
    "def f():\n    open('{path}', 'w')\nf()",
    "class A:\n    x = open('{path}', 'w')\nA()",
    "for x in open('{path}', 'w'):\n    pass",
    "with open('{path}', 'w'):\n    pass",
    "@open('{path}', 'w')\ndef f(): pass",
    "q = f16[2]\nq[open('{path}', 'w')]",
    "os.environ['X'] = '1'",
    "torch.ops.load_library('{path}')",
    CALL.format("*open('{path}', 'w')"),
    CALL.format("**open('{path}', 'w')"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", EXECUTES)
def test_explain_never_executes_code_in_the_text(text: str, tmp_path: Path) -> None:
    marker = tmp_path / "made"
    refused("explain", text.replace("{path}", str(marker)).replace("{{", "{").replace("}}", "}"))
    assert not marker.exists()


LARGE = [
    CALL.format("9**9**9"),
    CALL.format("2**100000"),
    CALL.format("[0] * 10**12"),
    CALL.format("'x' * 10**12"),
    CALL.format("10**12 * [0]"),
    CALL.format("torch.arange(10**12)"),
    CALL.format("range(10**12)"),
    CALL.format("torch.tensor([1]).repeat(10**12).tolist()"),
    CALL.format("torch.tensor([1, 2]).expand(10**9, 2).contiguous().tolist()"),
    CALL.format("torch.arange(99999)[:, None] + torch.arange(99999) + [1]"),
    CALL.format("(" * 5000),
    CALL.format("-" * 50_000 + "1"),
    CALL.format("[" * 90 + "]" * 90 + "()()"),
    CALL.format(".a" * 20_000),
    "a = [1, 2]\n" + "a = [a, a]\n" * 60 + CALL.format("torch.tensor(a)"),
    "a = [1] * 99999\n" + "a = a + a\n" * 60 + CALL.format("a"),
    "q" * LONGEST + "q",
    CALL.format("bf16[1 << 80]"),
    CALL.format("bf16[10**18, 10**18, 10**18]"),
    CALL.format("bf16[-1]"),
    CALL.format("bf16[1.5]"),
    CALL.format("bf16['x']"),
    CALL.format("1 / 0"),
    CALL.format("f16[2].view(3)"),
    CALL.format("torch.ones(2)[5]"),
    CALL.format("f16[2] + f16[3]"),
    CALL.format("torch.zeros(2, dtype='float16')"),
    CALL.format("int('9' * 5000)"),
]


@pytest.mark.parametrize("text", LARGE, ids=range(len(LARGE)))
def test_explain_refuses_oversized_and_invalid_expressions_quickly(text: str) -> None:
    start = time.monotonic()
    refused("explain", text)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "q", "1", "q = 1", "npu_fusion_attention(", "npu_fusion_attention", "model(q)", "\0", "a\0b(", "ä=)",
     "npu_fusion_atention(f16[1])", "attention.x()", "self.attention(q)", "missing.safetensors", "nothing.py", "[31m(",
     CALL.format("q, q"), CALL.format("x=1, x=2"), CALL.format("**{'a': 1}, a=2"), CALL.format("**{1: 2}"),
     "decode_attention(f16[1,1,2,64], PagedKVCache(1, 2))", "npu_fusion_attention(q=f16[1])(3)(", "return", "lambda: 0",
     f"npu_fusion_attention({Q}, actual_seq_qlen=int64[4])"],
)  # fmt: skip
def test_explain_refuses_text_that_is_not_a_call(text: str) -> None:
    refused("explain", text)


def test_explain_refuses_unreadable_files_and_logs(tmp_path: Path) -> None:
    (tmp_path / "call.safetensors").write_bytes(b"\xff" * 1000)
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "binary.log").write_bytes(os.urandom(5000))
    (tmp_path / "long.log").write_bytes(b"x" * (5 << 20))
    for file in ("call.safetensors", "empty.safetensors", "binary.log", "long.log", "gone.safetensors", "."):
        refused("explain", str(tmp_path / file))
    refused("explain", "-", stdin="x" * (5 << 20))
    refused("explain", CALL.format("'BSND'"), "--log", "nothing at all")
    refused("explain", CALL.format("'BSND'"), "--log", str(tmp_path / "gone.log"))
    text = run("explain", "call aclnnX\x1b[31m failed, error code is 161002")[1]
    assert "\x1b[31m" not in text


# --------------------------------------------------------------------------------------------------- the other commands


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "gone"],
        ["replay", "{folder}"],
        ["replay", "{file}", "--device", "toaster"],
        ["replay", "{file}", "--device", "meta"],
        ["npu", "--missing"],
        ["npu", "--coverage", "{folder}/gone"],
        ["bench", "--only", "nothing"],
        ["bench", "--device", "meta"],
        ["bench", "--output", "{folder}/gone/figures"],
        ["bench", "--repository", "--only", "nothing"],
        ["bench", "--repository", "--json"],
        ["bench", "--compare", "{folder}/gone.json", "{file}"],
        ["bench", "--compare", "{folder}", "{file}"],
        ["bench", "--compare", "{file}", "{file}"],
    ],
)
def test_invalid_arguments_print_one_error_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}")
    refused(*(word.format(folder=tmp_path / "folder", file=tmp_path / "file") for word in arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["replay", "bench"])
def test_replay_and_bench_report_a_missing_gpu(command: str, tmp_path: Path) -> None:
    more = [str(tmp_path)] if command == "replay" else []
    (tmp_path / "0000-attention.safetensors").write_bytes(b"")
    assert "no GPU is available" in refused(command, *more, "--device", "cuda")


COMMANDS = ("bench", "capi", "demo", "doctor", "explain", "npu", "ops", "replay")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_lists_the_json_option(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--json" in out
    assert "\b" not in out
    assert not any(len(line.rstrip()) > 200 for line in out.splitlines())


def test_ops_json_lists_operator_definitions() -> None:
    entries = json.loads(run("ops", "--json")[1])
    assert [entry["name"] for entry in entries] == sorted(entry["name"] for entry in entries)
    for name in ("aclnnFlashAttentionScoreV2", "attention"):
        result = json.loads(run("ops", name, "--json")[1])
        assert result["summary"] in [entry["summary"] for entry in entries]
        assert result["parameters"][0]["name"] in ("query", "q")
        assert {rule["level"] for rule in result["rules"]} >= {"meaning"}
    assert run("ops", "nothing", "--json")[0] == 2
    assert run("ops", "--json", "--write", ".")[0] == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_suggests_matching_commands(shell: str) -> None:
    asks = {"bash": {"COMP_WORDS": "fusion-attention ex", "COMP_CWORD": "1"}}.get(
        shell, {"_TYPER_COMPLETE_ARGS": "fusion-attention ex", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    runner = CliRunner(env={**asks, "_FUSION_ATTENTION_COMPLETE": f"complete_{shell}"})
    shown = runner.invoke(app, prog_name="fusion-attention").stdout
    assert "explain" in shown
    assert "replay" not in shown.replace("--replay", "")
