"""The autoencoders a person can choose: files, small approximate ones in two parts, and the pixel
space.
"""

from __future__ import annotations

import torch
from torch import Tensor

import folder_paths
from comfy.loading import naming
from comfy.vae.taehv_kinds import TRAINED, name_hint
from comfy.vae.vae import VAE
from comfy.weights.state_dict import load_torch_file

PIXEL_SPACE = "pixel_space"

# Approximate autoencoders come as two files, <name>_encoder and <name>_decoder, in
# models/vae_approx. With each goes the scale and shift of the latent space it was trained on.
APPROXIMATE_SPACES: dict[str, tuple[float, float]] = {
    "taesd": (0.18215, 0.0),
    "taesdxl": (0.13025, 0.0),
    "taesd3": (1.5305, 0.0609),
    "taef1": (0.3611, 0.1159),
}
IMAGE_APPROXIMATIONS = list(APPROXIMATE_SPACES)
VIDEO_APPROXIMATIONS = list(TRAINED)


def names() -> list[str]:
    """Everything that can be chosen, files first."""
    files = folder_paths.get_filename_list("vae")
    approximate = folder_paths.get_filename_list("vae_approx")
    files += [name for name in approximate if name.split(".")[0] in VIDEO_APPROXIMATIONS]
    complete = [name for name in IMAGE_APPROXIMATIONS if len(_parts(name, approximate)) == 2]
    return [*files, *complete, PIXEL_SPACE]


def load(name: str, device: torch.device | None = None) -> VAE:
    """The autoencoder of one of `names`.

    Args:
        name: The choice.
        device: Where it runs; None leaves that to the policy.
    Raises:
        WeightFileError: The file cannot be read or holds no autoencoder.
        FileNotFoundError: One of the two parts is missing.
    """
    if name == PIXEL_SPACE:
        vae = VAE(sd={"pixel_space_vae": torch.tensor(1.0)}, device=device)
    elif name in APPROXIMATE_SPACES:
        vae = VAE(sd=_load_approximation(name), device=device)
    else:
        is_approximate = name.split(".")[0] in VIDEO_APPROXIMATIONS
        path = folder_paths.get_full_path("vae", name) if is_approximate else None
        if path is None:
            folder = "vae_approx" if is_approximate else "vae"
            path = folder_paths.get_full_path_or_raise(folder, name)
        state_dict, metadata = load_torch_file(path, return_metadata=True)
        with naming(path, "choose a file that holds an autoencoder alone, of a kind that runs"):
            told = {**name_hint(name), **(metadata or {})}
            vae = VAE(sd=state_dict, metadata=told, device=device)
    vae.throw_exception_if_invalid()
    return vae


def _load_approximation(name: str) -> dict[str, Tensor]:
    """Both parts in one dict, with the scale and shift of the latent space."""
    parts = _parts(name, folder_paths.get_filename_list("vae_approx"))
    missing = {"encoder", "decoder"} - parts.keys()
    if missing:
        files = ", ".join(f"{name}_{part}.safetensors" for part in sorted(missing))
        raise FileNotFoundError(f"the autoencoder {name} needs {files} in models/vae_approx")
    merged: dict[str, Tensor] = {}
    for part, file in parts.items():
        path = folder_paths.get_full_path_or_raise("vae_approx", file)
        merged.update(
            {f"taesd_{part}.{key}": value for key, value in load_torch_file(path).items()}
        )
    scale, shift = APPROXIMATE_SPACES[name]
    merged["vae_scale"], merged["vae_shift"] = torch.tensor(scale), torch.tensor(shift)
    return merged


def _parts(name: str, files: list[str]) -> dict[str, str]:
    """The files of an approximate autoencoder by part: encoder, decoder."""
    return {
        part: file
        for part in ("encoder", "decoder")
        for file in files
        if file.split("/")[-1].startswith(f"{name}_{part}.")
    }
