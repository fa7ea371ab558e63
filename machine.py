"""This process's device, and its place among the processes of a job (torchrun).

`Machine` is what training needs to know of both: where tensors go and in which dtype, sums over all
processes, and how processes agree. Behind it stands how they find each other.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from config import TrainConfig, UserError, choose_device


@dataclass
class Machine:
    """This process's device, and its place among the processes of the job (torchrun)."""

    device: torch.device
    dtype: torch.dtype
    reason: str
    rank: int
    world_size: int
    sharded: bool = False  # FSDP2: each process holds a part of the model, see sharding.py
    talk: dist.ProcessGroup | None = None  # among the hosts, beside the devices' own

    @classmethod
    def start(cls, config: TrainConfig) -> "Machine":
        device, dtype, reason = choose_device(config.device, config.dtype)
        if device.type == "cpu" and dtype == torch.float16:
            raise UserError("--dtype=fp16 trains on GPUs; on a CPU use fp32 or bf16")
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        rank = int(os.environ.get("RANK", 0))
        talk = None
        if world_size > 1:
            if device.type == "cuda":
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                if device.index >= torch.cuda.device_count():
                    raise UserError(
                        f"--nproc_per_node is more than the {torch.cuda.device_count()} GPUs here"
                    )
                torch.cuda.set_device(device)
            backend, store = "nccl" if device.type == "cuda" else "gloo", meeting_place()
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
            # One process may prepare data for hours, while the others wait to hear of it.
            talk = dist.new_group(backend="gloo", timeout=timedelta(days=2))
            reason += f"; process {rank} of {world_size}, {config.parallel}"
        torch.set_float32_matmul_precision("high")  # TF32 on CUDA, for what autocast leaves fp32
        if device.type == "cpu":
            # Makes --resume exact, of compiled runs too. Costs a second at the start, no more.
            torch.use_deterministic_algorithms(True)
        sharded = world_size > 1 and config.parallel == "fsdp"
        return cls(device, dtype, reason, rank, world_size, sharded, talk)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def birthplace(self) -> torch.device:
        """Where weights begin: on the CPU, so that a seed means the same ones on every device.
        Under FSDP in the main process alone, from which the others get their parts."""
        return torch.device("meta" if self.sharded and not self.is_main else "cpu")

    def seed(self, number: int) -> None:
        """Seed the device's random numbers. torch.manual_seed looks at every kind of device there
        is, which takes milliseconds: a good part of a small model's step."""
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)
        elif self.device.type == "mps":
            torch.mps.manual_seed(number)
        else:
            torch.default_generator.manual_seed(number)

    def autocast(self) -> torch.autocast:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)

    def move(self, tensor: Tensor) -> Tensor:
        """A CPU tensor on the device. From pinned memory a copy does not make the host wait."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def numbers(self, *values: float) -> Tensor:
        """The host's numbers as a tensor on the device, (n,), without making the host wait."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.stack([torch.full((), v, dtype=dtype, device=self.device) for v in values])

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.world_size > 1:
            value = value.to(self.device, copy=True)
            dist.all_reduce(value)
        return value

    def gather(self, value: object) -> list:
        """Each process's value, in all of them."""
        values = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self.talk)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes go through the block, or none: a UserError in one of them ends them all.

        The main process raises it, whoever's it is; the others exit with the same code.
        """
        mistake = None
        try:
            yield
        except UserError as error:
            mistake = error
        texts = self.gather(mistake and str(mistake))
        if not any(texts):
            return
        if not self.is_main:
            raise SystemExit(2) from mistake
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise mistake or UserError(f"process {rank}: {text}")

    @contextlib.contextmanager
    def first_process_first(self) -> Iterator[None]:
        """The main process goes through the block alone; the others wait, then find its files."""
        if not self.is_main:
            with self.together():
                pass
        with self.together():
            yield
        if self.is_main:
            with self.together():
                pass

    def check_same(self, what: str, value: object) -> None:
        """Raises UserError if the processes do not have the same value."""
        with self.together():
            for rank, other in enumerate(self.gather(value)):
                if self.is_main and other != value:
                    raise UserError(
                        f"process {rank} has another {what} than process 0 ({other}, not {value}): "
                        f"all nodes must see the same files, in --out_dir and in the data"
                    )

    def stop(self) -> None:
        if self.world_size > 1:
            dist.destroy_process_group()


def meeting_place() -> dist.Store | None:
    """Where the processes of a job leave their addresses for each other; None: torch's choice.

    torchrun keeps one such store through all its restarts, and a restarted process would read there
    the addresses of dead ones (pytorch issue 135712). On one node the restart's number keeps them
    apart. Several nodes do not count alike: there a new store for each restart must be asked for.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise UserError(
            "restarts on several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's "
            "environment and --rdzv-backend=c10d, see docs/several_nodes.md"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    return dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def launcher() -> list[str]:
    """What this program was started with."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return ["torchrun", f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"]
    return ["python"]
