"""The benchmarks of whole steps and of generation: that they run, on a tiny model, and that their sums are right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_generate  # noqa: E402
import bench_ppo_step  # noqa: E402
import models  # noqa: E402
import run_layouts  # noqa: E402
import step  # noqa: E402

LAYERS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # and the last norm
HEAD = 512 * 64


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def row_of(folder: Path, trainer: str, algorithm: str, *words: str, device: str = "cpu") -> dict[str, Any]:
    out = folder / f"{trainer}-{algorithm}.jsonl"
    size = "--shape tiny --prompts 2 --samples 2 --prompt-tokens 5 --response-tokens 3 --steps 3 --warmup 1"
    where = ["--device", device, "--folder", str(folder), "--out", str(out)]
    which = ["--trainer", trainer, "--algorithm", algorithm]
    assert bench_ppo_step.main([*size.split(), *where, *words, *which]) == 0
    return json.loads(out.read_text().splitlines()[-1])


def check(row: dict[str, Any]) -> None:
    tokens = 4 * (5 + 3)
    assert len(row["steps_s"]) == 2 and min(row["steps_s"]) <= row["step_s"] <= max(row["steps_s"])
    assert row["tokens_per_s"] == pytest.approx(tokens / row["step_s"])
    assert 0 < row["stages_s"]["gen"] < row["step_s"]
    # Forward of generation, old log-probs and reference: 2 each; forward and backward of the update: 6.
    critic = (2 + 6 + 2) * LAYERS if row["algorithm"] == "ppo" else 0  # values, update; the reward model
    assert row["tflop"] * 1e12 == pytest.approx((12 * (LAYERS + HEAD) + critic) * tokens)
    assert row["trained_dtype"] == "float32" and "exp_avg float32" in row["optimizer_state"]
    assert row["versions"]["torch"] == torch.__version__ and row["command"].endswith(row["algorithm"])


@pytest.mark.parametrize("algorithm", bench_ppo_step.ALGORITHMS)
def test_a_step_of_fastppo(algorithm: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of(folder, "fastppo", algorithm)
    check(row)
    assert row["refit_bytes"] == 0  # float32 weights are the policy's own
    staged = set(row["stages_s"])
    assert {"reward", "old_log_prob", "update_actor", "update_weights"} <= staged
    assert ({"values", "update_critic"} <= staged) == (algorithm == "ppo")
    assert f"| tiny, {algorithm} | fastppo " in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", bench_ppo_step.ALGORITHMS)
def test_a_step_of_trl(algorithm: str, folder: Path) -> None:
    pytest.importorskip("trl", reason="needs trl, of the extra bench-gpu")
    if algorithm == "ppo":
        pytest.importorskip("trl.experimental.ppo", reason="TRL's PPO needs trl 1.12.0 or earlier")
    row = row_of(folder, "trl", algorithm)
    check(row)
    assert row["refit_bytes"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_memory_and_dtype_of_a_step_on_a_gpu(algorithm: str, folder: Path) -> None:
    row = row_of(folder, "fastppo", algorithm, device="cuda")
    assert 0 < row["peak_gib"] < row["device_gib"]
    peak = step.peak_tflops(torch.cuda.get_device_name())
    assert row["mfu"] == (peak and pytest.approx(row["tflop"] / row["step_s"] / peak))
    assert row["machine"] == torch.cuda.get_device_name() and row["driver_and_clocks"]


def test_settings_reach_the_trainer_and_the_table(folder: Path) -> None:
    row = row_of(folder, "fastppo", "rloo", "--fastppo", "policy.optimizer.lr=2e-5")
    assert row["variant"] == "policy.optimizer.lr=2e-5"
    metrics = (folder / "fastppo-rloo-tiny" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["actor/lr"] for line in metrics] == [2e-5] * 3


def test_words_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--steps", "2"], "--steps=2 leaves nothing after --warmup=2"),
        (["--micro-tokens", "383"], "holds 0 sequences of 384 tokens"),
        (["--micro-tokens", "1152"], "holds 3 sequences of 384 tokens, which must divide the 64 of a step"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--algorithm", "rloo"], "one --trainer and one --algorithm, or --all"),
    ):
        with pytest.raises(SystemExit):
            bench_ppo_step.main([*words, "--out", str(tmp_path / "rows.jsonl")])
        assert message in capsys.readouterr().err


def made_row(trainer: str, **other: Any) -> dict[str, Any]:
    same = {"prompts": 16, "samples": 4, "prompt_tokens": 128, "response_tokens": 256, "gradient_checkpointing": False}
    measured = {"step_s": 2.0, "steps_s": [1.5, 2.0, 4.0], "stages_s": {"gen": 0.5}, "tokens_per_s": 12288.0}
    more = {"mfu": 0.4321, "peak_gib": 16.0, "device_gib": 20.0, "refit_bytes": 0.0, "versions": {trainer: "1.2"}}
    return {"shape": "x", "algorithm": "rloo", "trainer": trainer, "variant": "", **same, **measured, **more, **other}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_tables_ratios_are_to_fastppos_run_of_the_same_work() -> None:
    rows = [
        made_row("trl", step_s=9.0, steps_s=[9.0], stages_s={"gen": 8.0}, peak_gib=24.0, refit_bytes=None),
        made_row("trl", algorithm="ppo", step_s=50.0),
        made_row("fastppo", step_s=99.0),
        made_row("fastppo"),  # the later one of its kind counts
    ]
    lines = [cells(line) for line in bench_ppo_step.table(rows).splitlines()]
    trl, other, ours = lines[2:]
    assert ours[1:] == [
        *("fastppo 1.2", "2 (1.5 to 4)", "0.5", "1.5", "12,288", "43.2%", "16.0", "20.0", "0", "1.00", "1.00"),
    ]
    assert trl[1:5] == ["trl 1.2", "9 (9 to 9)", "8", "1"] and trl[-3:] == ["-", "4.50", "1.50"]
    assert other[0] == "x, ppo" and other[-2:] == ["-", "-"]


def test_every_run_has_its_own_process_and_a_failure_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def child(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert command[:2] == [sys.executable, bench_ppo_step.__file__] and env["HF_HUB_OFFLINE"] == "1"
        args = bench_ppo_step.parser().parse_args(command[2:])
        asked.append(args)
        if args.trainer == ["fastppo"]:
            bench_ppo_step.write(args.out, made_row("fastppo", algorithm=args.algorithm[0]))
        return subprocess.CompletedProcess(command, 0 if args.trainer == ["fastppo"] else 3)

    monkeypatch.setattr(bench_ppo_step.subprocess, "run", child)
    words = ["--all", "--algorithm", "rloo", "ppo", "--shape", "tiny", "--gradient-checkpointing", "--liger"]
    words += ["--trl", "top_k=5", "--fastppo", "a=1", "--peers", "site", "--out", str(tmp_path / "rows.jsonl")]
    assert bench_ppo_step.main(words) == 1
    pairs = [("fastppo", "rloo"), ("trl", "rloo"), ("fastppo", "ppo"), ("trl", "ppo")]
    assert [(args.trainer[0], args.algorithm[0]) for args in asked] == pairs
    for args in asked:
        assert args.shape == "tiny" and args.gradient_checkpointing and args.liger and args.peers == Path("site")
        assert args.micro_tokens == 16 * 384 and args.seconds == 1e9 and not args.all
        own = args.trainer == ["fastppo"]
        assert (args.fastppo, args.trl) == ((["a=1"], []) if own else ([], ["top_k=5"]))
    assert capsys.readouterr().out.count("| exit code 3 |") == 2


def work(**other: Any) -> step.Work:
    sizes = {"prompts": 16, "samples": 4, "prompt_tokens": 128, "response_tokens": 256, "micro_tokens": 6144}
    how = {"gradient_checkpointing": False, "steps": 7, "warmup": 2, "seconds": 10.0}
    return step.Work("tiny", "rloo", **(sizes | how | other))


def test_no_step_begins_late_but_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 30.0, 50.0, 58.0, 59.0])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(now))
    clock = step.Clock(work(), cuda=False)
    assert [clock.tick() for _ in range(4)] == [True, True, True, False]
    row = clock.row([{"gen": 9.0}, {"gen": 8.0}, {"gen": 2.0, "reward": 1.0}])
    assert row["steps_s"] == [8.0] and row["stages_s"] == {"gen": 2.0, "reward": 1.0}
    assert row["tokens_per_s"] == 64 * 384 / 8


def test_generation_is_timed_and_its_length_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def generate(self, rows: int) -> torch.Tensor:
            return torch.zeros(rows, 384)

    now = iter([0.0, 1.0, 4.0, 5.0, 7.0, 9.0])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(now))
    clock, model = step.Clock(work(warmup=0), cuda=False), Model()
    clock.time_generation(model)
    clock.tick()
    assert model.generate(1).shape == model.generate(rows=1).shape
    clock.tick()
    assert clock.row()["stages_s"] == {"gen": (4 - 1) + (7 - 5)}
    with pytest.raises(AssertionError, match="sequences of 384 tokens, not of 385"):
        late = Model()
        step.Clock(work(prompt_tokens=129), cuda=False, ticks=[0.0], generation=[0.0]).time_generation(late)
        monkeypatch.setattr(step.time, "perf_counter", lambda: 0.0)
        late.generate(1)


def test_dtypes_of_an_optimizers_state() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    adamw = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    assert step.dtypes({"adamw": adamw.state_dict(), "schedule": {"step": 1}}) == (
        "exp_avg bfloat16 and float32, exp_avg_sq bfloat16 and float32"
    )


def test_a_cards_peak_is_found_by_its_name() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "Another")
    assert [step.peak_tflops(name) for name in names] == [989, 989, 756, 312, None]


def test_both_trainers_read_the_same_prompts(folder: Path) -> None:
    from transformers import AutoTokenizer

    path = models.model_folder("tiny", torch.float32, folder)
    ids = models.prompt_ids("tiny", 3, 7)
    assert AutoTokenizer.from_pretrained(path)([models.text_of(prompt) for prompt in ids])["input_ids"] == ids
    assert min(map(min, ids)) >= len(models.SPECIAL)


def test_generation_of_one_length_and_of_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "generate.jsonl"
    words = "--shape tiny --batch 4 --samples 2 --prompt-tokens 5 --response-tokens 8 --rounds 3"
    assert bench_generate.main([*words.split(), "--device", "cpu", "--folder", str(folder), "--out", str(out)]) == 0
    fixed, ragged = (json.loads(line) for line in out.read_text().splitlines())
    for side in ("fastppo", "transformers"):
        assert fixed[side]["tokens"] == [4 * 8] * 3
        assert all(16 <= tokens < 16 * 8 for tokens in ragged[side]["tokens"])  # some have stopped
        speeds = [n / s for n, s in zip(fixed[side]["tokens"], fixed[side]["seconds"], strict=True)]
        assert fixed[side]["tokens_per_s"] == sorted(speeds)[1]
    assert fixed["ratio"] == fixed["fastppo"]["tokens_per_s"] / fixed["transformers"]["tokens_per_s"]
    assert fixed["refit_bytes"] == 0 and ragged["requests"] == 16
    lines = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert [line[1] for line in lines] == ["4 x 4"] * 2 + ["16 x 4"] * 2 and lines[0][-1] == "1.00"


def test_stop_tokens_make_half_the_length() -> None:
    stops = bench_generate.stop_tokens(151936, 256)
    assert len(set(stops)) == len(stops) == 1187  # 151936 / 128: one token in 128 stops
    assert min(stops) >= len(models.SPECIAL) and max(stops) < 151936


@pytest.mark.slow
def test_layouts_are_compared_with_one_process(folder, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = folder / "layouts.jsonl"
    size = "--shape tiny --device cpu --prompts 2 --samples 2 --prompt-tokens 5 --response-tokens 3 --micro-tokens 16"
    words = [*size.split(), "--steps", "3", "--warmup", "1", "--folder", str(folder / "layouts"), "--out", str(out)]
    assert run_layouts.main([*words, "--layouts", "one", "fully_shard"]) == 0
    one, sharded = (json.loads(line) for line in out.read_text().splitlines())
    assert (one["ranks"], sharded["ranks"], len(one["steps_s"])) == (1, 2, 3)
    assert "-m torch.distributed.run" in sharded["command"] and "policy.fully_shard=true" in sharded["command"]
    assert run_layouts.difference(sharded, one) < 1e-5
    table = capsys.readouterr().out.splitlines()
    assert table[-2].startswith("| one | 1 |") and table[-1].startswith("| fully_shard | 2 |")


def test_a_difference_is_that_of_the_metric_furthest_off():
    right = {"metrics": {"a": [2.0, -4.0], "b": [0.0, 0.0]}}
    assert run_layouts.difference({"metrics": {"a": [2.0, -3.0], "b": [0.0, 0.1]}}, right) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--steps", "2"], "--warmup=2 must be at least 0 and less than --steps=2"),
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
    ],
)
def test_layouts_that_cannot_be_compared(words, error, capsys):
    with pytest.raises(SystemExit):
        run_layouts.main(words)
    assert error in capsys.readouterr().err


def test_the_range_of_a_layouts_steps_is_that_after_the_warm_up():
    row = {
        "layout": "one", "ranks": 1, "warmup": 2, "steps_s": [9.0, 8.0, 1.0, 4.0, 2.0, 3.0], "step_s": 2.5,
        "gen_s": 0.5, "peak_gib": None, "metrics": {"a": [1.0]},
    }  # fmt: skip
    assert "| one | 1 | 2.5 (1 to 4) | 0.5 | - | 0.0e+00 |" in run_layouts.table([row])


def test_a_layout_that_fails_is_a_row_that_says_so(folder, capsys):
    out = folder / "failed.jsonl"
    words = ["--shape", "tiny", "--device", "cpu", "--folder", str(folder / "failed"), "--out", str(out)]
    assert run_layouts.main([*words, "--layouts", "one", "--prompts", "0"]) == 1
    assert "exit code" in json.loads(out.read_text())["error"]
    assert "num_prompts_per_step" in capsys.readouterr().err
