"""The figures of a run: what a forward costs, what a card can do, and the speeds made of them."""

import json

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

import report
from config import TrainConfig, UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_the_flops_are_those_that_torch_counts(tied):
    """But for the pairs that may not look at each other, which plain attention multiplies too."""
    config = GPTConfig(
        50, 16, 3, 4, 24, num_key_value_heads=2, tie_word_embeddings=tied, attention="manual"
    )
    B, T = 2, 7
    with FlopCounterMode(display=False) as forward:
        logits = GPT(config)(torch.zeros(B, T, dtype=torch.long))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    hidden_pairs = T * (T - 1) // 2
    hidden = hidden_pairs * 4 * B * config.num_attention_heads * config.head_dim * 3
    assert report.forward_flops(config, B, T) == forward.get_total_flops() - hidden
    assert 2 * report.forward_flops(config, B, T) == backward.get_total_flops() - 2 * hidden


def test_a_card_is_known_by_its_whole_name(monkeypatch):
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L40": None,
        "NVIDIA GeForce RTX 4090": 165e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "Tesla T4": 65e12,
    }
    cuda = torch.device("cuda", 0)
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert report.peak_flops(cuda, torch.bfloat16) == peak
        assert report.peak_flops(cuda, torch.float32) is None  # of other units of the card
    assert report.peak_flops(CPU, torch.bfloat16) is None


def reported(tmp_path, monkeypatch, peak: float | None) -> list[dict]:
    """Lines of metrics.jsonl of steps that take 4 seconds, 100 tokens, 60 targets, 4,000 FLOP."""
    clock = iter(range(100, 1000, 4))
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    run = report.Report(tmp_path, TrainConfig(), True, 0, CPU, peak)
    for step in (1, 2, 3):
        line = {"step": step, "loss": 1.0, "lr": 0.1, "tokens": 100 * step, "targets": 60 * step}
        run.step(line, 4000)
        run.write(line)
    run.close()
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_speeds_are_logged_from_the_second_step_on(tmp_path, monkeypatch):
    first, second, _ = reported(tmp_path, monkeypatch, None)
    assert "tokens_per_second" not in first  # with the first step things are compiled
    assert second["tokens_per_second"] == 25
    assert second["targets_per_second"] == 15
    assert second["flops_per_second"] == 1000
    assert "mfu" not in second
    assert list(second) == [name for name in report.FIELDS if name in second]


def test_mfu_is_the_share_of_the_peak(tmp_path, monkeypatch):
    assert reported(tmp_path, monkeypatch, 5000.0)[-1]["mfu"] == 0.2


def test_memory_is_logged(tmp_path, monkeypatch):
    pytest.importorskip("resource")
    here = reported(tmp_path, monkeypatch, None)[-1]["memory_gib"]
    assert 0.05 < here < 100
    ballast = torch.ones(2**28)  # 1 GiB
    assert report.peak_memory(CPU) / 2**30 > 1 and ballast[0] == 1


def test_a_full_disk_costs_lines_but_not_the_training(tmp_path, capsys):
    """A limit on the size of files does as a full disk: it takes the first half of a line."""
    resource = pytest.importorskip("resource")
    before, size = resource.getrlimit(resource.RLIMIT_FSIZE), 2**20
    file, earlier = tmp_path / "metrics.jsonl", "x" * (size - 20) + "\n"
    file.write_text(earlier)
    run = report.Report(tmp_path, TrainConfig(), True, 0, CPU, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        for step in (1, 2):
            run.write({"step": step, "loss": 1.0, "lr": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == earlier and run.lost_lines == 2
    run.write({"step": 3, "loss": 1.0, "lr": 0.1})
    run.close()
    assert json.loads(file.read_text().splitlines()[-1])["step"] == 3
    assert capsys.readouterr().out.count("cannot be written (File too large)") == 1


@pytest.mark.parametrize("why", ["Is a directory", "metrics.jsonl, line 2", "by the library"])
def test_a_picture_that_cannot_be_drawn_costs_a_line_on_the_terminal(
    tmp_path, capsys, monkeypatch, why
):
    line = {"step": 1, "loss": 1.0, "tokens": 9, "targets": 8}
    text = json.dumps(line) + "\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    if why == "Is a directory":
        (tmp_path / "loss.png").mkdir()
    elif why == "metrics.jsonl, line 2":
        (tmp_path / "metrics.jsonl").write_text(text + text[:9] + "\n" + text)
    else:
        monkeypatch.setattr(Figure, "savefig", lambda *_, **__: 1 / 0)
        why = "division by zero"
    run = report.Report(tmp_path, TrainConfig(), True, 0, CPU, None)
    run.evaluation(line | {"val_loss": 2.0, "val_ppl": 7.39, "val_bpb": 1.5}, 1.0, "one\ntwo")
    run.close()
    said = capsys.readouterr().out.splitlines()
    assert "validation loss 2.0000" in said[0] and said[1:3] == ["  | one", "  | two"]
    assert said[3].startswith(f"{tmp_path / 'loss.png'} cannot be written: ") and why in said[3]


@pytest.mark.parametrize("content", [b"", b"\xff", b"../x", b"a b", b"x" * 101])
def test_an_id_that_wandb_did_not_get_from_us_is_refused(tmp_path, content):
    made = report.wandb_id(tmp_path)
    assert report.wandb_id(tmp_path) == made and len(made) == 8
    (tmp_path / "wandb_id.txt").write_bytes(content)
    with pytest.raises(UserError, match="wandb_id.txt"):
        report.wandb_id(tmp_path)
