"""Exact changes of the latent basis, folded into the weights at both ends of it.

The diffusion model adds white Gaussian noise, which an orthogonal matrix leaves white. So the
basis of the latent space may be turned freely: z' = Q z needs no retraining, only Q in
`quant_conv` and in the UNet's last convolution, and its transpose in `post_quant_conv` and in the
UNet's first one. We turn it such that the Stable Diffusion 1.x factors that every client uses for
previews (rgb = z' @ SD1_RGB_FACTORS) show our colours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.autoencoder import LATENT_CHANNELS, LATENT_SCALE, Autoencoder
from tools.demo_model.checkpoint import AUTOENCODER, UNET

# Public constants of the SD 1.x latent format: row = latent channel, column = red, green, blue.
SD1_RGB_FACTORS = torch.tensor(
    [
        [0.3512, 0.2297, 0.3227],
        [0.3250, 0.4974, 0.2350],
        [-0.2829, 0.1762, 0.2721],
        [-0.2120, -0.2616, -0.7177],
    ]
)


def fit_rgb(latents: Tensor, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least-squares linear preview: 8x8 mean colour = latent @ factors + bias.

    Args:
        latents: Scaled latents [B, 4, H, W].
        pictures: [B, 3, 8 H, 8 W] in -1..1.
    Returns:
        factors [4, 3], bias [3], and the share of variance explained per colour [3].
    """
    flat = latents.permute(0, 2, 3, 1).reshape(-1, LATENT_CHANNELS).double()
    target = F.avg_pool2d(pictures, 8).permute(0, 2, 3, 1).reshape(-1, 3).double()
    design = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
    solution = torch.linalg.lstsq(design, target).solution
    explained = 1 - (target - design @ solution).var(0) / target.var(0)
    return solution[:-1].float(), solution[-1].float(), explained.float()


def rotation_to_sd1(factors: Tensor) -> Tensor:
    """The orthogonal Q [4, 4] for which Q^T SD1_RGB_FACTORS is closest to `factors` (Procrustes).

    With z' = Q z the SD 1.x preview z'^T F equals z^T Q^T F, so the two maps must agree.
    """
    u, _, vt = torch.linalg.svd(SD1_RGB_FACTORS.double() @ factors.double().T)
    return (u @ vt).float()


@torch.no_grad()
def rotate_autoencoder(
    autoencoder: Autoencoder, rotation: Tensor, mean: Tensor, std: Tensor
) -> None:
    """Make the scaled latents rotation (z - mean) / std, in place; decoded pictures stay.

    Args:
        autoencoder: Changed in its two 1x1 convolutions. rotation: Orthogonal [4, 4]. mean: Mean
        of the scaled latents per channel [4]. std: Their standard deviation over all channels, a
        scalar: an isotropic scale commutes with rotations.
    """
    quant, post = autoencoder.quant_conv, autoencoder.post_quant_conv
    head = slice(0, LATENT_CHANNELS)
    unscaled_mean = mean / LATENT_SCALE
    post.bias += post.weight[:, :, 0, 0] @ unscaled_mean
    post.weight.copy_(torch.einsum("ojhw,ij->oihw", post.weight, rotation) * std)
    quant.bias[head] = rotation @ (quant.bias[head] - unscaled_mean) / std
    quant.weight[head] = torch.einsum("ij,jkhw->ikhw", rotation, quant.weight[head]) / std
    quant.bias[LATENT_CHANNELS:] -= 2 * std.log()


def _mixed_outputs(state_dict: dict[str, Tensor], name: str, rotation: Tensor) -> dict[str, Tensor]:
    """Weight and bias of a convolution whose first four outputs are turned."""
    mixed = {}
    for part in ("weight", "bias"):
        tensor = state_dict[f"{name}.{part}"]
        head = torch.einsum("ij,j...->i...", rotation, tensor[:LATENT_CHANNELS].float())
        mixed[f"{name}.{part}"] = torch.cat([head.to(tensor.dtype), tensor[LATENT_CHANNELS:]])
    return mixed


def _mixed_inputs(state_dict: dict[str, Tensor], name: str, rotation: Tensor) -> dict[str, Tensor]:
    """Weight of a convolution that expects turned inputs: W Q^T."""
    weight = state_dict[f"{name}.weight"]
    mixed = torch.einsum("ojhw,ij->oihw", weight.float(), rotation)
    return {f"{name}.weight": mixed.to(weight.dtype).contiguous()}


def rotate_unet(state_dict: dict[str, Tensor], rotation: Tensor) -> dict[str, Tensor]:
    """A copy of a single-file state dict whose UNet works on latents turned by `rotation`."""
    return {
        **state_dict,
        **_mixed_inputs(state_dict, UNET + "input_blocks.0.0", rotation),
        **_mixed_outputs(state_dict, UNET + "out.2", rotation),
    }


def rotate_state_dict(state_dict: dict[str, Tensor], rotation: Tensor) -> dict[str, Tensor]:
    """A copy of a single-file state dict whose whole latent space is turned by `rotation`.

    The rows of `quant_conv` that give log-variances are left alone: the server uses the mean, and
    a rotated diagonal Gaussian has no diagonal form.
    """
    return {
        **rotate_unet(state_dict, rotation),
        **_mixed_outputs(state_dict, AUTOENCODER + "quant_conv", rotation),
        **_mixed_inputs(state_dict, AUTOENCODER + "post_quant_conv", rotation),
    }
