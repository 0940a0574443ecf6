"""ControlNets, T2I adapters and Control-LoRAs beside a diffusion model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from comfy import ops, resize
from comfy.control.base import (
    Control,
    ControlBase,
    StrengthType,
    broadcast_image_to,
    no_preprocessing,
)
from comfy.control.hints import COLOURS, with_channels
from comfy.control.low_rank import low_rank_patches
from comfy.control.union import check_kinds
from comfy.devices import placement, residency
from comfy.ldm.t2i_adapter.model import Adapter, Adapter_light
from comfy.ldm.unet import controlnet
from comfy.ops.encoded import weight_shape
from comfy.patching.patcher import ModelPatcher

CHANNELS = "hint_channels"  # what a network calls the number of channels of its hints
# Ends of the names of the first layer that reads the text.
TEXT_ENTRIES = ("attn2.to_k", "attn2.kv_proj", "context_embedder", "txt_in")


class ControlNet(ControlBase):
    """A ControlNet.

    Attributes:
        control_model: The network.
        control_model_wrapped: The patcher around it.
        manual_cast_dtype: Type to compute in, if not that of the weights.
        model_sampling_current: The diffusion model's sampling object, while a run lasts.
    """

    def __init__(
        self,
        control_model: nn.Module | None = None,
        global_average_pooling: bool = False,
        compression_ratio: int = 8,
        latent_format: Any = None,
        load_device: torch.device | None = None,
        manual_cast_dtype: torch.dtype | None = None,
        extra_conds: Sequence[str] = ("y",),
        strength_type: StrengthType = StrengthType.CONSTANT,
        concat_mask: bool = False,
        preprocess_image: Callable[[Tensor], Tensor] = no_preprocessing,
    ) -> None:
        super().__init__()
        self.control_model: Any = control_model  # an nn.Module, or what takes its place
        self.load_device = load_device or placement.get_torch_device()
        if control_model is not None:
            self.control_model_wrapped = ModelPatcher(
                control_model, load_device=self.load_device, offload_device=self.offload_device
            )
        self.compression_ratio = compression_ratio
        self.global_average_pooling = global_average_pooling
        self.model_sampling_current: Any = None
        self.manual_cast_dtype = manual_cast_dtype
        self.latent_format = latent_format
        self.extra_conds = list(extra_conds)
        self.strength_type = strength_type
        self.concat_mask = concat_mask
        self.preprocess_image = preprocess_image
        self._hint_size: tuple[int, int] | None = None

    def get_control(
        self,
        x_noisy: Tensor,
        t: Tensor,
        cond: dict[str, Any],
        batched_number: int,
        transformer_options: dict[str, Any],
    ) -> Control | None:
        """See ControlBase."""
        earlier = self.earlier_control(x_noisy, t, cond, batched_number, transformer_options)
        if self.is_idle(t):
            return earlier
        self.check_pictures(x_noisy)
        dtype = self.manual_cast_dtype or self.control_model.dtype
        hint = self._hint_for(x_noisy, dtype)
        # Also where there are as many hints as items: these may be several conditionings.
        hint = broadcast_image_to(hint, x_noisy.shape[0], batched_number)
        context = cond.get("crossattn_controlnet", cond["c_crossattn"])
        self._check_text(context)
        extra = dict(self.extra_args)
        for name in self.extra_conds:
            if cond.get(name) is not None:
                extra[name] = _cast(cond[name], dtype, x_noisy.device)
        sampling = self.model_sampling_current
        control = self.control_model(
            x=sampling.calculate_input(t, x_noisy).to(dtype),
            hint=hint,
            timesteps=sampling.timestep(t).to(dtype),
            context=_cast(context, dtype, x_noisy.device),
            **extra,
        )
        return self.control_merge(control, earlier, output_dtype=None)

    def _check_text(self, context: Tensor) -> None:
        """Refuse texts of another width than the network reads."""
        network: Any = self.control_model
        layers = network.named_modules() if isinstance(network, nn.Module) else ()
        readers = (layer for name, layer in layers if name.endswith(TEXT_ENTRIES))
        wanted = next((weight_shape(layer)[1] for layer in readers), None)
        if wanted is not None and context.shape[-1] != wanted:
            raise ValueError(
                f"control_net: expected a ControlNet for texts of width {context.shape[-1]}, as "
                f"this model has them, found one for {wanted}: it was made for another model"
            )

    def _hint_for(self, x_noisy: Tensor, dtype: torch.dtype) -> Tensor:
        """The hint at the size of a latent; kept as long as sizes stay."""
        height, width = (size * self.compression_ratio for size in x_noisy.shape[-2:])
        hint = self.cond_hint
        if hint is None or (height, width) != self._hint_size:
            hint = self._make_hint(width, height)
            self._hint_size = (height, width)
        self.cond_hint = hint.to(device=x_noisy.device, dtype=dtype)
        return self.cond_hint

    def _make_hint(self, width: int, height: int) -> Tensor:
        if self.vae is not None:
            ratio = self.vae.spacial_compression_encode()
            width, height = width * ratio, height * ratio
        elif self.latent_format is not None:
            raise ValueError("this control network needs a VAE; connect one to its apply node")
        if self.cond_hint_original is None:
            raise ValueError("this control network was given no hint; call set_cond_hint first")
        given = with_channels(self.cond_hint_original, self._hint_channels())
        hint = resize.common_upscale(given, width, height, self.upscale_algorithm, "center")
        hint = self.preprocess_image(hint)
        if self.vae is not None:
            loaded = residency.loaded_models(only_currently_used=True)
            hint = self.vae.encode(hint.movedim(1, -1))
            residency.load_for_run(loaded)
        if self.latent_format is not None:
            hint = self.latent_format.process_in(hint)
        joined = [hint]
        for extra in self.extra_concat_orig:
            size = (hint.shape[-1], hint.shape[-2], self.upscale_algorithm, "center")
            part = resize.common_upscale(extra.to(hint.device), *size)
            joined.append(resize.repeat_to_batch_size(part, hint.shape[0]))
        return torch.cat(joined, dim=1) if len(joined) > 1 else hint

    def _hint_channels(self) -> int | None:
        """Channels of the pictures that the network, or the VAE before it, takes; None if it does
        not tell.
        """
        return COLOURS if self.vae is not None else getattr(self.control_model, CHANNELS, None)

    def copy(self) -> ControlNet:
        """See ControlBase."""
        new = type(self)(None, load_device=self.load_device)
        new.control_model = self.control_model
        new.control_model_wrapped = self.control_model_wrapped
        new.manual_cast_dtype = self.manual_cast_dtype
        self.copy_to(new)
        return new

    def get_models(self) -> list[Any]:
        """See ControlBase."""
        return [*super().get_models(), self.control_model_wrapped]

    def parts_given(self) -> frozenset[str] | None:
        """See ControlBase."""
        return getattr(self.control_model, "gives", None)

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        """See ControlBase."""
        super().pre_run(model, percent_to_timestep_function)
        check_kinds(self.control_model, self.extra_args.get("control_type") or ())
        self.model_sampling_current = model.model_sampling

    def cleanup(self) -> None:
        """See ControlBase."""
        self.model_sampling_current = None
        super().cleanup()


class ControlNetSD35(ControlNet):
    """A ControlNet of Stable Diffusion 3.5 large, which takes an embedder from the model it is
    used with.
    """

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        """Take over the embedder."""
        super().pre_run(model, percent_to_timestep_function)
        self.control_model.borrow(model.diffusion_model)

    def cleanup(self) -> None:
        """See ControlBase."""
        self.control_model.give_back()
        super().cleanup()


def _cast(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Floating tensors (also in lists) in the network's type, others only moved."""
    if isinstance(value, list):
        return [_cast(item, dtype, device) for item in value]
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


class ControlLora(ControlNet):
    """A ControlNet stored as low-rank differences from the diffusion model it is used with.

    Its network exists only while a run lasts: a base module whose weights are the diffusion model's
    own, patched as those are and with the differences on top. So it costs the device what its
    patched weights take, and the planner streams them where there is no room.
    """

    def __init__(
        self,
        control_weights: Mapping[str, Tensor],
        global_average_pooling: bool = False,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(None, global_average_pooling)
        self.control_weights = control_weights
        self.control_model_wrapped: Any = None
        self.model_options = dict(model_options or {})
        self.extra_conds += ["y"] if "y" not in self.extra_conds else []

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        """Build the network from the diffusion model's weights and the differences."""
        super().pre_run(model, percent_to_timestep_function)
        self._give_up()  # where a run is tried again
        config = dict(model.model_config.unet_config)
        for name in ("out_channels", "transformer_depth_output", "dtype"):
            config.pop(name, None)
        config["hint_channels"] = self.control_weights["input_hint_block.0.weight"].shape[1]
        self.manual_cast_dtype = model.manual_cast_dtype
        dtype = model.get_dtype()
        cast = self.manual_cast_dtype is not None
        operations = ops.manual_cast if cast else ops.disable_weight_init
        built = controlnet.ControlNet(**config, dtype=dtype, device="meta", operations=operations)
        weights, patches = low_rank_patches(model, self.control_weights, built, dtype)
        built.requires_grad_(False).load_state_dict(weights, assign=True)
        view = getattr(model, "current_patcher", None)
        place = getattr(view, "load_device", None) or getattr(model, "device", None)
        self.load_device = place or placement.get_torch_device()
        self.control_model = built.eval()
        self.control_model_wrapped = ModelPatcher(built, self.load_device, self.offload_device)
        self.control_model_wrapped.patches = patches
        others = residency.loaded_models(only_currently_used=True)
        residency.load_for_run([*others, self.control_model_wrapped], self._own_bytes(dtype))

    def copy(self) -> ControlLora:
        """See ControlBase."""
        new = ControlLora(self.control_weights, self.global_average_pooling, self.model_options)
        self.copy_to(new)
        return new

    def cleanup(self) -> None:
        """See ControlBase."""
        self._give_up()
        super().cleanup()

    def _give_up(self) -> None:
        """Let the network go, with what it holds on the device."""
        if self.control_model_wrapped is not None:
            residency.unload_model_clones(self.control_model_wrapped)
        self.control_model = self.control_model_wrapped = None

    def get_models(self) -> list[Any]:
        """The network exists only during a run, and is loaded beside the others as it begins."""
        own = [] if self.control_model_wrapped is None else [self.control_model_wrapped]
        return [*ControlBase.get_models(self), *own]

    def inference_memory_requirements(self, dtype: torch.dtype) -> float:
        """Bytes of the network that the run will build, and of the chain."""
        return self._own_bytes(dtype) + super().inference_memory_requirements(dtype)

    def _own_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights that are not the diffusion model's as they are."""
        elements = 0
        for key, weight in self.control_weights.items():
            stem, _, part = key.rpartition(".")
            down = self.control_weights.get(f"{stem}.down")
            if part == "up" and down is not None:
                elements += weight.shape[0] * down[0].numel()
            elif part != "down":
                elements += weight.numel()
        return elements * dtype.itemsize


class T2IAdapter(ControlBase):
    """A T2I adapter: features of the hint alone, the same for every step."""

    def __init__(
        self,
        t2i_model: Adapter | Adapter_light,
        channels_in: int,
        compression_ratio: int,
        upscale_algorithm: str,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.t2i_model = t2i_model
        self.channels_in = channels_in
        self.control_input: Control | None = None
        self.compression_ratio = compression_ratio
        self.upscale_algorithm = upscale_algorithm
        self.device = device or placement.get_torch_device()

    def parts_given(self) -> frozenset[str]:
        """See ControlBase."""
        return frozenset({"input", "middle"})

    def scale_image_to(self, width: int, height: int) -> tuple[int, int]:
        """The least size the adapter can take that is no smaller."""
        step = self.t2i_model.unshuffle_amount
        return math.ceil(width / step) * step, math.ceil(height / step) * step

    def get_control(
        self,
        x_noisy: Tensor,
        t: Tensor,
        cond: dict[str, Any],
        batched_number: int,
        transformer_options: dict[str, Any],
    ) -> Control | None:
        """See ControlBase."""
        earlier = self.earlier_control(x_noisy, t, cond, batched_number, transformer_options)
        if self.is_idle(t):
            return earlier
        self.check_pictures(x_noisy)
        fresh: Control = {}
        for part, features in self._features(x_noisy, x_noisy.shape[0] // batched_number).items():
            fresh[part] = [
                None if f is None else broadcast_image_to(f, x_noisy.shape[0], batched_number)
                for f in features
            ]
        return self.control_merge(fresh, earlier, x_noisy.dtype)

    def _features(self, x_noisy: Tensor, batch: int) -> Control:
        """Features of the hints of the first `batch` pictures; kept as long as sizes stay."""
        width, height = self.scale_image_to(
            x_noisy.shape[3] * self.compression_ratio, x_noisy.shape[2] * self.compression_ratio
        )
        if self.cond_hint_original is None:
            raise ValueError("this T2I adapter was given no hint; call set_cond_hint first")
        original = self.cond_hint_original[:batch]
        wanted = (original.shape[0], height, width)
        known = self.cond_hint
        if known is None or (known.shape[0], *known.shape[-2:]) != wanted:
            hint = with_channels(original, self.channels_in)
            hint = resize.common_upscale(hint, width, height, self.upscale_algorithm, "center")
            self.cond_hint = hint.float().to(self.device)
            self.control_input = None
        if self.control_input is None:
            assert self.cond_hint is not None
            place = x_noisy.device, x_noisy.dtype
            state = self.t2i_model.state_dict()
            moved = {key: weight.to(*place) for key, weight in state.items()}  # for this call
            hint = self.cond_hint.to(*place)
            self.control_input = functional_call(self.t2i_model, moved, (hint,))
        return self.control_input

    def copy(self) -> T2IAdapter:
        """See ControlBase."""
        new = T2IAdapter(
            self.t2i_model, self.channels_in, self.compression_ratio, self.upscale_algorithm
        )
        self.copy_to(new)
        return new

    def cleanup(self) -> None:
        """See ControlBase."""
        self.control_input = None
        super().cleanup()
