"""What every test shares: no network, one thread, and the markers `slow` and `gpu`."""

import os

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # before transformers and datasets are imported: they read it then
)
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # sums in one order: the same bits on every machine of one kind


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: this machine has no CUDA device"))
