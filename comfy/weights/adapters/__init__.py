"""The table of adapter kinds; the first that recognises its tensors under a key wins."""

from comfy.weights.adapters.base import AdapterError, WeightAdapterBase
from comfy.weights.adapters.glora import GLoRAAdapter
from comfy.weights.adapters.ia3 import IA3Adapter
from comfy.weights.adapters.input_rotation import InputBOFTAdapter, InputOFTAdapter
from comfy.weights.adapters.loha import LoHaAdapter
from comfy.weights.adapters.lokr import LoKrAdapter
from comfy.weights.adapters.lora import LoRAAdapter
from comfy.weights.adapters.oft import BOFTAdapter, OFTAdapter

ADAPTERS: list[type[WeightAdapterBase]] = [
    LoRAAdapter,
    LoHaAdapter,
    LoKrAdapter,
    GLoRAAdapter,
    OFTAdapter,
    BOFTAdapter,
    IA3Adapter,
    InputOFTAdapter,
    InputBOFTAdapter,
]

__all__ = [
    "ADAPTERS",
    "AdapterError",
    "BOFTAdapter",
    "GLoRAAdapter",
    "IA3Adapter",
    "InputBOFTAdapter",
    "InputOFTAdapter",
    "LoHaAdapter",
    "LoKrAdapter",
    "LoRAAdapter",
    "OFTAdapter",
    "WeightAdapterBase",
]
