"""The table of adapter kinds; the first that recognises its tensors under a key wins."""

from comfy.weights.adapters.base import AdapterError, WeightAdapterBase
from comfy.weights.adapters.lora import LoRAAdapter

ADAPTERS: list[type[WeightAdapterBase]] = [LoRAAdapter]

__all__ = ["ADAPTERS", "AdapterError", "LoRAAdapter", "WeightAdapterBase"]
