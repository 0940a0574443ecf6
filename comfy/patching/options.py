"""`model_options`: settings of a view that change its forward without touching weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ModelOptions = dict[str, Any]


def create_model_options_clone(orig_model_options: ModelOptions) -> ModelOptions:
    """A copy whose dicts and lists can be edited without touching the original."""
    return _copy_containers(orig_model_options)


def _copy_containers(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy_containers(item) for item in value]
    return value


def set_model_options_patch_replace(
    model_options: ModelOptions,
    patch: Callable[..., Any],
    name: str,
    block_name: str,
    number: int,
    transformer_index: int | None = None,
) -> ModelOptions:
    """Replace a block's attention (or the block); returns the edited dict.

    Args:
        model_options: Options to edit; the tables on the way are copied, not shared.
        patch: The replacement.
        name: Table, such as "attn1" or "dit".
        block_name: Kind of block, such as "input" or "double_block".
        number: Index of the block.
        transformer_index: Index of the transformer within the block; None means all.
    """
    to = model_options.setdefault("transformer_options", {}).copy()
    tables = dict(to.get("patches_replace", {}))
    table = dict(tables.get(name, {}))
    where = (block_name, number) if transformer_index is None else (
        block_name, number, transformer_index
    )  # fmt: skip
    table[where] = patch
    tables[name] = table
    to["patches_replace"] = tables
    model_options["transformer_options"] = to
    return model_options


def _append_option(
    model_options: ModelOptions, name: str, function: Callable[..., Any], disable_cfg1: bool
) -> ModelOptions:
    model_options[name] = [*model_options.get(name, []), function]
    if disable_cfg1:
        model_options["disable_cfg1_optimization"] = True
    return model_options


def set_model_options_post_cfg_function(
    model_options: ModelOptions,
    post_cfg_function: Callable[..., Any],
    disable_cfg1_optimization: bool = False,
) -> ModelOptions:
    """Append a function that runs after guidance; returns the edited dict."""
    return _append_option(
        model_options, "sampler_post_cfg_function", post_cfg_function, disable_cfg1_optimization
    )


def set_model_options_pre_cfg_function(
    model_options: ModelOptions,
    pre_cfg_function: Callable[..., Any],
    disable_cfg1_optimization: bool = False,
) -> ModelOptions:
    """Append a function that runs before guidance; returns the edited dict."""
    return _append_option(
        model_options, "sampler_pre_cfg_function", pre_cfg_function, disable_cfg1_optimization
    )


class OptionSetters:
    """The `set_model_*` methods of a patcher; they edit its `model_options`."""

    model_options: ModelOptions

    def set_model_sampler_cfg_function(
        self, sampler_cfg_function: Callable[..., Any], disable_cfg1_optimization: bool = False
    ) -> None:
        """Replace guidance.

        A function of three parameters takes (cond, uncond, cond_scale); one of a single
        parameter takes the dict of the guidance contract.
        """
        if _positional_count(sampler_cfg_function) == 3:
            self.model_options["sampler_cfg_function"] = lambda args: sampler_cfg_function(
                args["cond"], args["uncond"], args["cond_scale"]
            )
        else:
            self.model_options["sampler_cfg_function"] = sampler_cfg_function
        if disable_cfg1_optimization:
            self.model_options["disable_cfg1_optimization"] = True

    def set_model_sampler_post_cfg_function(
        self, post_cfg_function: Callable[..., Any], disable_cfg1_optimization: bool = False
    ) -> None:
        """Append a function that runs after guidance."""
        self.model_options = set_model_options_post_cfg_function(
            self.model_options, post_cfg_function, disable_cfg1_optimization
        )

    def set_model_sampler_pre_cfg_function(
        self, pre_cfg_function: Callable[..., Any], disable_cfg1_optimization: bool = False
    ) -> None:
        """Append a function that runs before guidance."""
        self.model_options = set_model_options_pre_cfg_function(
            self.model_options, pre_cfg_function, disable_cfg1_optimization
        )

    def set_model_sampler_calc_cond_batch_function(
        self, sampler_calc_cond_batch_function: Callable[..., Any]
    ) -> None:
        """Replace the evaluation of all conditionings."""
        self.model_options["sampler_calc_cond_batch_function"] = sampler_calc_cond_batch_function

    def disable_model_cfg1_optimization(self) -> None:
        """Evaluate the negative conditioning at scale 1 too."""
        self.model_options["disable_cfg1_optimization"] = True

    def set_model_unet_function_wrapper(self, unet_wrapper_function: Callable[..., Any]) -> None:
        """Wrap each call of the network."""
        self.model_options["model_function_wrapper"] = unet_wrapper_function

    def set_model_denoise_mask_function(self, denoise_mask_function: Callable[..., Any]) -> None:
        """Change the denoise mask per step."""
        self.model_options["denoise_mask_function"] = denoise_mask_function

    def set_model_patch(self, patch: Callable[..., Any], name: str) -> None:
        """Append a patch to a table of `transformer_options["patches"]`."""
        to = self.model_options.setdefault("transformer_options", {})
        tables = to.setdefault("patches", {})
        tables[name] = [*tables.get(name, []), patch]

    def set_model_patch_replace(
        self,
        patch: Callable[..., Any],
        name: str,
        block_name: str,
        number: int,
        transformer_index: int | None = None,
    ) -> None:
        """Replace a block's attention (or the block)."""
        self.model_options = set_model_options_patch_replace(
            self.model_options, patch, name, block_name, number, transformer_index
        )

    def set_model_attn1_patch(self, patch: Callable[..., Any]) -> None:
        """Change q, k, v of self-attention."""
        self.set_model_patch(patch, "attn1_patch")

    def set_model_attn2_patch(self, patch: Callable[..., Any]) -> None:
        """Change q, k, v of cross-attention."""
        self.set_model_patch(patch, "attn2_patch")

    def set_model_attn1_replace(
        self,
        patch: Callable[..., Any],
        block_name: str,
        number: int,
        transformer_index: int | None = None,
    ) -> None:
        """Replace a block's self-attention."""
        self.set_model_patch_replace(patch, "attn1", block_name, number, transformer_index)

    def set_model_attn2_replace(
        self,
        patch: Callable[..., Any],
        block_name: str,
        number: int,
        transformer_index: int | None = None,
    ) -> None:
        """Replace a block's cross-attention."""
        self.set_model_patch_replace(patch, "attn2", block_name, number, transformer_index)

    def set_model_attn1_output_patch(self, patch: Callable[..., Any]) -> None:
        """Change the output of self-attention."""
        self.set_model_patch(patch, "attn1_output_patch")

    def set_model_attn2_output_patch(self, patch: Callable[..., Any]) -> None:
        """Change the output of cross-attention."""
        self.set_model_patch(patch, "attn2_output_patch")

    def set_model_input_block_patch(self, patch: Callable[..., Any]) -> None:
        """Change the hidden state after an input block."""
        self.set_model_patch(patch, "input_block_patch")

    def set_model_input_block_patch_after_skip(self, patch: Callable[..., Any]) -> None:
        """Change the hidden state after an input block's skip was taken."""
        self.set_model_patch(patch, "input_block_patch_after_skip")

    def set_model_output_block_patch(self, patch: Callable[..., Any]) -> None:
        """Change hidden state and skip before an output block."""
        self.set_model_patch(patch, "output_block_patch")

    def set_model_middle_block_after_patch(self, patch: Callable[..., Any]) -> None:
        """Change the hidden state after the middle block."""
        self.set_model_patch(patch, "middle_block_after_patch")

    def set_model_emb_patch(self, patch: Callable[..., Any]) -> None:
        """Change the timestep embedding."""
        self.set_model_patch(patch, "emb_patch")

    def set_model_forward_timestep_embed_patch(self, patch: Callable[..., Any]) -> None:
        """Add a layer type to the network's dispatch: (type, function)."""
        self.set_model_patch(patch, "forward_timestep_embed_patch")

    def set_model_double_block_patch(self, patch: Callable[..., Any]) -> None:
        """Change the streams after a double block."""
        self.set_model_patch(patch, "double_block")

    def set_model_post_input_patch(self, patch: Callable[..., Any]) -> None:
        """Change the tokens after the input projections."""
        self.set_model_patch(patch, "post_input")

    def set_model_noise_refiner_patch(self, patch: Callable[..., Any]) -> None:
        """Change the tokens after the noise refiner."""
        self.set_model_patch(patch, "noise_refiner")

    def set_model_rope_options(
        self,
        scale_x: float = 1.0, shift_x: float = 0.0,
        scale_y: float = 1.0, shift_y: float = 0.0,
        scale_t: float = 1.0, shift_t: float = 0.0,
    ) -> None:  # fmt: skip
        """Scale and shift rotary positions per axis."""
        self.model_options.setdefault("transformer_options", {})["rope_options"] = {
            "scale_x": scale_x, "scale_y": scale_y, "scale_t": scale_t,
            "shift_x": shift_x, "shift_y": shift_y, "shift_t": shift_t,
        }  # fmt: skip


def _positional_count(function: Callable[..., Any]) -> int:
    import inspect

    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-ins without a signature
        return 1
