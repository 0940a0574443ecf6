"""The base model: a diffusion network with everything the sampler needs to know about it.

It joins four things: the network, its noise levels and prediction type (`model_sampling`), its
latent space (`latent_format`), and the translation of conditioning options into network inputs
(`extra_conds`). Samplers see only `apply_model(x, sigma) -> denoised`.
"""

# ruff: noqa: ARG002 - hooks whose arguments sub-classes and custom nodes use

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy import conds, resize
from comfy.families.family import ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.families.prediction import model_sampling
from comfy.ldm.unet.model import UNetModel
from comfy.nn import attention
from comfy.nn.wrappers import run_wrapped
from comfy.ops.choice import pick_operations
from comfy.ops.encoded import state_dict_for_file
from comfy.weights.fill import fill

logger = logging.getLogger(__name__)

# What a fully masked picture looks like in the latent space of Stable Diffusion 1.x: the latent of
# mid grey, in channel order, after the format's scale.
BLANK_LATENT = (0.8223, -0.6876, 0.6364, 0.1380)

# Activation memory: MiB per latent cell for a memory_usage_factor of 1. Attention that keeps no
# score matrix scales with the bytes of an element; otherwise the figure covers the scores too.
MIB_PER_CELL_AND_BYTE = 0.01
MIB_PER_CELL = 0.15
ATTENTION_WITHOUT_SCORES = frozenset({"pytorch", "flash", "sage", "xformers"})


class BaseModel(nn.Module):
    """A diffusion network that samplers can use.

    Args:
        model_config: The family instance with the network's configuration.
        model_type: Prediction type; None: `usual_type`.
        device: Where the weights are created. "meta" creates none: `load_model_weights` then
            supplies them.
        unet_model: Class of the network; None: `network`.

    Attributes:
        network: Class of the network.
        usual_type: Its prediction type where nobody names another.
        text_width: Entry of the network's configuration that tells the width of text tokens, where
            it is the only input that a text encoder makes.
        memory_usage_factor_conds: Network inputs that take memory as a latent of their size does.
    """

    network: ClassVar[type[nn.Module]] = UNetModel
    usual_type: ClassVar[ModelType] = ModelType.EPS
    text_width: ClassVar[str | None] = None
    memory_usage_factor_conds: tuple[str, ...] = ()

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
        unet_model: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        unet_config = dict(model_config.unet_config)
        self.model_config = model_config
        self.latent_format = model_config.latent_format
        self.manual_cast_dtype = model_config.manual_cast_dtype
        self.device = device
        self.current_patcher: Any = None
        if not unet_config.pop("disable_unet_model_creation", False):
            operations = model_config.custom_operations or pick_operations(
                unet_config.get("dtype"),
                self.manual_cast_dtype,
                fp8_optimizations=model_config.optimizations.get("fp8", False),
            )
            network = unet_model or self.network
            self.diffusion_model: Any = network(**unet_config, device=device, operations=operations)
            self.diffusion_model.eval()
        self.model_type = model_type or self.usual_type
        self.model_sampling = model_sampling(model_config, self.model_type)
        self.adm_channels: int = unet_config.get("adm_in_channels") or 0
        self.concat_keys: tuple[str, ...] = ()
        self.memory_usage_factor = model_config.memory_usage_factor

    # -- prediction ------------------------------------------------------------------------------

    def apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Clean estimate of a noisy latent.

        Args:
            x: Noisy latent [B, C, H, W].
            t: Noise level sigma of each item [B].
            c_concat: Channels appended to the scaled latent (inpainting, editing).
            c_crossattn: Text context [B, L, D].
            control: Residuals of control networks.
            transformer_options: Patches and facts for the network's blocks.
            kwargs: Further network inputs made by `extra_conds`.
        """
        options = {} if transformer_options is None else transformer_options
        arguments = (x, t, c_concat, c_crossattn, control, options)
        return run_wrapped(self._apply_model, self, "apply_model", options, *arguments, **kwargs)

    def _apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Tensor | None = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        sigma = t
        dtype = self.get_dtype_inference()
        network_input = self.model_sampling.calculate_input(sigma, x)
        if c_concat is not None:
            network_input = torch.cat([network_input, c_concat.to(network_input)], dim=1)
        device = network_input.device
        inputs = {name: _cast_floats(value, device, dtype) for name, value in kwargs.items()}
        timestep = self.process_timestep(self.model_sampling.timestep(sigma).float(), **inputs)
        output = self.diffusion_model(
            self.latent_for_network(network_input.to(dtype), inputs),
            timestep,
            context=_cast_floats(c_crossattn, device, dtype),
            control=control,
            transformer_options=transformer_options,
            **inputs,
        )
        made = self.output_as_latent(output)
        return self.model_sampling.calculate_denoised(sigma, made.float(), x)

    def latent_for_network(self, latent: Tensor, inputs: dict[str, Any]) -> Any:
        """The scaled latent as the network takes it; `inputs` are its other inputs."""
        return latent

    def output_as_latent(self, output: Any) -> Tensor:
        """Inverse of `latent_for_network`, for what the network gives."""
        made: Tensor = output
        return made

    def process_timestep(self, timestep: Tensor, **kwargs: Any) -> Any:
        """Last change of the timestep before the network sees it."""
        return timestep

    def get_dtype(self) -> torch.dtype:
        """Dtype the network's weights are kept in."""
        return self.diffusion_model.dtype

    def get_dtype_inference(self) -> torch.dtype:
        """Dtype the network computes in."""
        return self.manual_cast_dtype or self.get_dtype()

    # -- conditioning ----------------------------------------------------------------------------

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Turns the options of one conditioning entry into network inputs.

        Args:
            kwargs: `noise`, `device`, `latent_image`, `denoise_mask`, `prompt_type`, the entry's
                own options, and `cross_attn`, its text context.
        """
        made: dict[str, Any] = {}
        concat = self.concat_cond(**kwargs)
        if concat is not None:
            made["c_concat"] = conds.CONDNoiseShape(concat)
        adm = self.encode_adm(**kwargs)
        if adm is not None:
            made["y"] = conds.CONDRegular(adm)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDCrossAttn(kwargs["cross_attn"])
        if kwargs.get("cross_attn_controlnet") is not None:
            made["crossattn_controlnet"] = conds.CONDCrossAttn(kwargs["cross_attn_controlnet"])
        return made

    def latent_axes(self) -> int:
        """Axes of the latents that the network takes, batch and channels included."""
        return int(self.latent_format.latent_dimensions) + 2

    def parts_wanted(self, shapes: Sequence[Sequence[int]]) -> str:
        """What to take in place of a latent of parts of these shapes; empty if they fit."""
        del shapes
        return f"one latent of {self.latent_axes()} axes"

    def conditioning_widths(self) -> dict[str, int]:
        """Widths of the inputs that text encoders make, where the network has one for each."""
        config = self.model_config.unet_config
        if self.text_width is not None:
            width = config.get(self.text_width)
            return {} if width is None else {"c_crossattn": int(width)}
        widths = {
            "c_crossattn": config.get("context_dim") or config.get("context_in_dim"),
            "y": config.get("adm_in_channels") or config.get("vec_in_dim"),
        }
        if isinstance(widths["c_crossattn"], (list, tuple)):  # one per transformer layer, all alike
            widths["c_crossattn"] = next((w for w in widths["c_crossattn"] if w), None)
        return {name: width for name, width in widths.items() if isinstance(width, int)}

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """Shapes of the inputs that weigh in memory estimates, before the inputs are made."""
        return {}

    def encode_adm(self, **kwargs: Any) -> Tensor | None:
        """Vector that is added to the timestep embedding [B, adm_channels]; None if the network has
        none.
        """
        return None

    def set_inpaint(self) -> None:
        """Makes the network's additional channels the mask and the masked picture."""
        self.concat_keys = ("mask", "masked_image")

    def blank_inpaint_image_like(self, latent: Tensor) -> Tensor:
        """Latent of a picture of which nothing is known."""
        blank = torch.tensor(BLANK_LATENT, dtype=latent.dtype, device=latent.device)
        return blank.reshape(1, -1, 1, 1).expand_as(latent).clone()

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """Channels beside the latent, in the order of `concat_keys`; None if the network takes
        none.
        """
        if not self.concat_keys:
            return None
        noise: Tensor = kwargs["noise"]
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is None:  # everything is to be made
            made, image = torch.ones_like(noise)[:, :1], self.blank_inpaint_image_like(noise)
        else:
            made = self._concat_mask(mask, noise)
            image = self._concat_image(**kwargs)
        parts = {"mask": made, "masked_image": image}
        return torch.cat([parts[key] for key in self.concat_keys], dim=1)

    def _concat_mask(self, mask: Tensor, noise: Tensor) -> Tensor:
        """Mask of ones and zeros in one channel, at the size and batch of the noise."""
        if mask.ndim == noise.ndim:
            mask = mask[:, :1]
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
        if mask.shape[-2:] != noise.shape[-2:]:
            mask = _resize(mask, noise)
        return resize.resize_to_batch_size(mask.round(), noise.shape[0]).to(noise)

    def _concat_image(self, **kwargs: Any) -> Tensor:
        """Latent of the masked picture, scaled, at the size and batch of the noise.

        Where the conditioning brings none it is the run's own latent, of which VAE Encode (for
        Inpainting) has greyed out the masked part.
        """
        noise: Tensor = kwargs["noise"]
        image = kwargs.get("concat_latent_image")
        image = kwargs.get("latent_image") if image is None else self.process_latent_in(image)
        if image is None:
            return self.blank_inpaint_image_like(noise)
        if image.shape[-2:] != noise.shape[-2:]:
            image = _resize(image, noise)
        return resize.resize_to_batch_size(image, noise.shape[0]).to(noise)

    def scale_latent_inpaint(
        self,
        sigma: Tensor,
        noise: Tensor,
        latent_image: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """The known region of a masked run, noised to the level `sigma` [B]."""
        per_item = sigma.reshape([sigma.shape[0]] + [1] * (noise.ndim - 1))
        return self.model_sampling.noise_scaling(per_item, noise, latent_image)

    # -- latent space ----------------------------------------------------------------------------

    def process_latent_in(self, latent: Tensor) -> Tensor:
        """Autoencoder's latent -> the network's."""
        return self.latent_format.process_in(latent)

    def process_latent_out(self, latent: Tensor) -> Tensor:
        """The network's latent -> the autoencoder's."""
        return self.latent_format.process_out(latent)

    # -- memory ----------------------------------------------------------------------------------

    def memory_required(
        self,
        input_shape: Iterable[int],
        cond_shapes: Mapping[str, list[Iterable[int]]] | None = None,
    ) -> float:
        """Estimate of the activation memory of one network call, in bytes.

        Args:
            input_shape: Shape of the batch [B, C, ...].
            cond_shapes: Shapes of further inputs by name; those in `memory_usage_factor_conds`
                count.
        """
        shapes = [tuple(input_shape)]
        for name in self.memory_usage_factor_conds:
            shapes.extend(tuple(shape) for shape in (cond_shapes or {}).get(name, []))
        cells = sum(shape[0] * math.prod(shape[2:]) for shape in shapes)
        if attention.selected().name in ATTENTION_WITHOUT_SCORES:
            per_cell = MIB_PER_CELL_AND_BYTE * self.get_dtype_inference().itemsize
        else:
            per_cell = MIB_PER_CELL
        return cells * per_cell * self.memory_usage_factor * 1024 * 1024

    # -- weights ---------------------------------------------------------------------------------

    def load_model_weights(
        self,
        sd: StateDict,
        unet_prefix: str = "",
        assign: bool = True,
    ) -> BaseModel:
        """Fills the network from a file's tensors; entries used are removed from `sd`.

        Args:
            sd: Tensors by key, as in the file.
            unet_prefix: Prefix of the network's keys.
            assign: Accepted for compatibility; tensors of the right dtype are always taken over,
                not copied.

        Raises:
            IncompleteWeightsError: No key fits, or weights of the network are missing.
        """
        keys = [key for key in sd if key.startswith(unet_prefix)]
        weights = {key[len(unet_prefix) :]: sd.pop(key) for key in keys}
        weights = self.model_config.process_unet_state_dict(weights)
        part = f"diffusion network ({type(self.diffusion_model).__name__})"
        fill(self.diffusion_model, weights, part)
        return self

    def state_dict_for_saving(
        self,
        clip_state_dict: StateDict | None = None,
        vae_state_dict: StateDict | None = None,
        clip_vision_state_dict: StateDict | None = None,
    ) -> StateDict:
        """One dict of tensors in the single-file layout of the family."""
        config = self.model_config
        saved: StateDict = {}
        if clip_state_dict is not None:
            saved.update(config.process_clip_state_dict_for_saving(clip_state_dict))
        if vae_state_dict is not None:
            saved.update(config.process_vae_state_dict_for_saving(vae_state_dict))
        if clip_vision_state_dict is not None:
            saved.update(config.process_clip_vision_state_dict_for_saving(clip_vision_state_dict))
        network = state_dict_for_file(self.diffusion_model)
        saved.update(config.process_unet_state_dict_for_saving(network))
        if self.model_type is ModelType.V_PREDICTION:
            saved["v_pred"] = torch.tensor([])
        return saved


def _resize(tensor: Tensor, like: Tensor) -> Tensor:
    """Rows and columns of another tensor, cropping what does not fit its proportions."""
    return resize.common_upscale(tensor, like.shape[-1], like.shape[-2], "bilinear", "center")


def convert_tensor(extra: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A network input on the device, floats in a dtype; what is no tensor is passed on."""
    return _cast_floats(extra, device, dtype)


def _cast_floats(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Moves tensors, also those in lists, to the device; floats become the network's dtype."""
    if isinstance(value, Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, list):
        return [_cast_floats(item, device, dtype) for item in value]
    return value
