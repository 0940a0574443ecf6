"""The class custom nodes test weights for that carry their own code.

Here an encoded weight is a plain tensor and its layer knows the code (`comfy.ops.encoded`), so no
weight of this server is an instance.
"""

import torch


class QuantizedTensor(torch.Tensor):
    """A tensor stored in a code, of servers that keep code and data together."""
