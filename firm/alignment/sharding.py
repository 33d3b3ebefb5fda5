"""Divides a policy's frozen parameters among the processes of a client, by PyTorch's FSDP2.

Every process keeps its part of each parameter. A layer's parameters are gathered before its forward
and backward pass and freed afterwards, so that all processes must run the same passes at the same
time. The adapter is not divided: each process has a copy, whose gradients are summed as without
sharding.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from firm.alignment.adapters.lora import adapted_modules
from firm.alignment.sequences import set_preferences
from firm.base.devices import communicates
from firm.base.errors import ProcessLost, TeamLost
from firm.base.sanitize import first_line
from firm.federation.processes import ACCOMPANY, Processes, Team


class _Stopped(Exception):
    """Raised before a pass that another member, which has failed, will not run."""


@dataclass(frozen=True)
class ShardedTeam(Team):
    """A team whose members hold parts of the policy, and run all its passes together.

    Inside `unanimous`, members may run different numbers of forward passes: before each one all
    members agree on whether any of them continues, and those that have finished run passes of a
    single token. Backward passes must be equal in number.
    """

    policy: Any = None
    """The policy, whose frozen parameters are divided."""
    call: Callable[[], None] = lambda: None
    """Calls the other members to `accompany`, from their wait for the first process's messages."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Runs passes of this process alone, the first of the team; the others accompany them."""
        self.call()
        with self.unanimous():
            yield

    def accompany(self) -> None:
        """Runs passes without content while another member is in `alone`."""
        with self.unanimous():
            pass

    @contextmanager
    def unanimous(self) -> Iterator[None]:
        """Runs passes of the policy, and raises an error on every member if any member does.

        Raises:
            TeamLost: A member failed in the middle of its passes, where the others wait for its
                part of the parameters: the run must end.
        """
        error, num_passes = None, 0

        def before_pass(*_: Any) -> None:
            nonlocal num_passes
            if self._count(is_running=True)[1]:
                raise _Stopped
            num_passes += 1

        hook = self.policy.get_base_model().register_forward_pre_hook(before_pass, prepend=True)
        try:
            yield
        except _Stopped:
            pass
        except ProcessLost:
            raise
        except Exception as own:
            if num_passes:  # the others wait inside the pass
                raise self._lost(own) from own
            error = own
        finally:
            hook.remove()
        has_failed = error is not None
        while (counts := self._count(has_failed=has_failed))[0]:
            if not counts[1]:
                self._pass_without_content()
        with super().unanimous():
            if error:
                raise error

    def _count(self, *, is_running: bool = False, has_failed: bool = False) -> list[int]:
        """Returns the numbers of members that run another pass, and of those that have failed."""
        return self.sum(torch.tensor([is_running, has_failed], dtype=torch.int64)).tolist()

    @torch.no_grad()
    def _pass_without_content(self) -> None:
        rows = getattr(self.policy, "adapter_forward", None)
        preferences = rows and rows.rows.preferences
        set_preferences(self.policy, None)
        try:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.policy.device)
            self.policy.get_base_model()(input_ids=token, use_cache=False)
        except Exception as error:
            raise self._lost(error) from error
        finally:
            set_preferences(self.policy, preferences)

    def _lost(self, error: Exception) -> TeamLost:
        if isinstance(error, RuntimeError) and "onnection" in str(error):
            return self.lost()
        return TeamLost(
            f"process {self.rank} of the client's {self.size} could not finish a pass of the "
            f"sharded policy ({type(error).__name__}: {first_line(error).rstrip('.')}), for which "
            "the others wait; repair the cause, then resume from the last checkpoint."
        )


def shard_(policy: Any, processes: Processes, team: Team, device: torch.device) -> ShardedTeam:
    """Divides a policy's frozen parameters among a team, and moves them to a device.

    A layer at a time is on the device as a whole. The adapter is moved as it is.

    Args:
        policy: A `PeftModel` on the CPU.
        processes: The run's processes.
        team: The processes that share the policy.
        device: The device of this process.

    Returns:
        The team, for passes of the policy.

    Raises:
        ValueError: When processes cannot exchange tensors on the device, a parameter is not a
            floating-point number, or torch is too old.
    """
    # not imported with the module, since it takes longer than all else that other runs need
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:  # the adapter's
        raise ValueError(
            f"policy.shard needs a newer torch than {torch.__version__}, whose fully_shard cannot "
            "leave out parameters: upgrade torch, or set it to false."
        )
    if not communicates(device):
        raise ValueError(
            f"policy.shard needs a device between which torch can exchange tensors, got {device}: "
            "set it to false, or policy.device to cpu."
        )
    for layer in adapted_modules(policy).values():
        for name, module in layer.named_children():
            if name != "base_layer":
                module.to(device)
    model, frozen = policy.get_base_model(), _frozen_parameters(policy)
    for name, parameter in frozen.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"policy.shard needs floating-point parameters, but {name} is of type "
                f"{parameter.dtype}: use a checkpoint that is not quantized."
            )
    mesh = DeviceMesh.from_group(team.group, device.type)
    adapter = set(policy.parameters()).difference(frozen.values())
    for module in (*_layers(policy), model):
        fully_shard(module, mesh=mesh, ignored_params=adapter, reshard_after_forward=True)
    # otherwise generation would wait for all processes of the run instead of the team's
    model._is_fsdp_managed_module = False
    first = processes.rank - team.rank

    def call() -> None:
        for rank in range(first + 1, first + team.size):
            processes.send(ACCOMPANY, rank)

    sharded = ShardedTeam(**vars(team), policy=policy, call=call)
    processes.accompany = sharded.accompany
    return sharded


def part_bytes(policy: Any, size: int) -> int:
    """Returns the bytes that `size` processes would each keep of a policy that is not sharded.

    A parameter is divided along its first axis; the last processes may have a smaller part.
    """
    sizes = (math.ceil(len(p) / size) * p[:1].nbytes for p in _frozen_parameters(policy).values())
    return sum(sizes)


def gathered_bytes(policy: Any) -> int:
    """Returns an upper bound on the bytes of the parameters that a pass gathers at a time.

    The parameters outside of layers stay for the whole pass; of the layers, there are the current
    one, and the next one twice: as received, and as copied from there.
    """
    sizes = [sum(p.nbytes for p in _frozen_parameters(layer).values()) for layer in _layers(policy)]
    total = sum(p.nbytes for p in _frozen_parameters(policy).values())
    return total - sum(sizes) + 3 * max(sizes, default=0)


def _frozen_parameters(module: Any) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters outside of the adapter, by name."""
    return {name: p for name, p in module.named_parameters() if "lora_" not in name}


def _layers(policy: Any) -> list[torch.nn.Module]:
    """Returns the layers that are gathered one after the other."""
    return [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
