"""What one kind of worker costs: the measured or stated figures that predictions and simulations start from.

Knows the file's format (JSON, one object) and which figures are possible; reads no file. `cbdisagg profile` measures
one on this machine; those of other devices are under configs/profiles/.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec import Struct, field

from cbdisagg.config import ConfigError
from cbdisagg.core.cost import CostModel
from cbdisagg.core.sizing import DeviceMemory
from cbdisagg.messages import Costs


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of the processor, beside the model's: `event_s` to take in a message, `step_s` and `token_s` between two
    steps (for each step, and for each sequence in it), `request_s` in the api until a request is asked for.

    `others_...`: what processes on the host that are no workers, clients included, compute for each message with
    tokens, for each token in it, for each request. They share `cores` with the workers; 0: there are enough for all.
    """

    event_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0
    others_message_s: float = 0.0
    others_token_s: float = 0.0
    others_request_s: float = 0.0
    cores: int = 0


class Error(Struct, frozen=True, forbid_unknown_fields=True):
    """How far predictions were off on steps that were not used to fit, as parts of the measured time."""

    median: float
    p90: float
    steps: int


class Profile(Costs, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Coefficients of the cost model, and what else is to be known of a worker.

    `transfer`: whether pages are copied within the step that computes them ("shm") or travel beside it, layer by layer
    ("zmq"). `beside_step`, `beside_push`: by what part a step is slowed for each other step, and each push in flight,
    on the same memory. `kv_bytes`: of one token in all `layers`. `context`: tokens that the model can see.
    `memory`: of a GPU; None: a CPU, of whose memory the config says how much is for pages.
    """

    layers: int
    kv_bytes: int
    context: int
    model: str
    dtype: str
    machine: str
    threads: int = 0
    memory: DeviceMemory | None = None
    transfer: Literal["shm", "zmq"] = "zmq"
    beside_step: float = 0.0
    beside_push: float = 0.0
    host: Host = field(default_factory=Host)
    versions: dict[str, str] = field(default_factory=dict)
    errors: dict[str, Error] = field(default_factory=dict)
    note: str = ""

    @property
    def cost(self) -> CostModel:
        return CostModel.of(self)

    def foreign(self, layers: int, kv_bytes: int, on_gpu: bool) -> str:
        """What about it shows that it was measured with another model, or on another kind of device; "" if nothing."""
        if (self.layers, self.kv_bytes) != (layers, kv_bytes):
            sizes = f"{self.layers} layers and {self.kv_bytes} bytes of KV a token, here {layers} and {kv_bytes}"
            return f"{self.model} in {self.dtype}: {sizes}"
        if on_gpu != (self.memory is not None):
            return f"{self.machine}, and this is {'a' if on_gpu else 'no'} GPU"
        return ""


def parse_profile(data: bytes, source: str) -> Profile:
    """The profile in the file `source`. Raises ConfigError: one line that names the file and what is wrong in it."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not a profile: {error}") from None
    problem = _problem(profile)
    if problem:
        raise ConfigError(f"{source}: {problem}")
    return profile


def format_profile(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def _problem(profile: Profile) -> str:
    numbers = {
        name: getattr(profile, name)
        for name in ("h", "h_mix", "a", "d", "s", "t0", "t_d", "first_s", "beside_step", "beside_push")
    }
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            return f"{name} = {value}: must be a number from 0 up"
    if not 0 < profile.B < math.inf:
        return f"B = {profile.B}: must be a number of bytes per second above 0"
    tokens = [tokens for tokens, _ in profile.L]
    if not tokens or tokens[0] < 1 or any(later <= sooner for sooner, later in pairwise(tokens)):
        return "L: must hold [tokens, seconds], by rising tokens from 1 up"
    if any(not 0 <= seconds < math.inf for _, seconds in profile.L):
        return "L: the seconds must be numbers from 0 up"
    if min(profile.layers, profile.kv_bytes, profile.context) < 1:
        return "layers, kv_bytes and context must be numbers from 1 up"
    if profile.memory is not None and not 0 < profile.memory.weights < profile.memory.total:
        return "memory: the weights must be above 0 and fit in the total"
    return ""
