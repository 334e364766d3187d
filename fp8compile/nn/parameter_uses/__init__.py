"""Watch what a model's forwards do with each parameter, while they run in eager mode or are compiled."""

from fp8compile.nn.parameter_uses.first_forward import stop_watching, untold, watch_first_forward, watched
from fp8compile.nn.parameter_uses.past_forward import PAST_FORWARD, known_past_forward, past_forward, settled
from fp8compile.nn.parameter_uses.running import Watching
from fp8compile.nn.parameter_uses.uses import Kind, Uses, forget_uses, uses_seen

__all__ = [
    "PAST_FORWARD",
    "Kind",
    "Uses",
    "Watching",
    "forget_uses",
    "known_past_forward",
    "past_forward",
    "settled",
    "stop_watching",
    "untold",
    "uses_seen",
    "watch_first_forward",
    "watched",
]
