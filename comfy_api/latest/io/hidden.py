"""Values that the executor hands to a node without an input for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest.io.options import Word


class Hidden(Word):
    """What a node can ask for: the member's name is the attribute of `cls.hidden`."""

    unique_id = "UNIQUE_ID"
    """Id of the node in the prompt, a string."""
    prompt = "PROMPT"
    """The whole prompt as it was posted."""
    extra_pnginfo = "EXTRA_PNGINFO"
    """Dictionary of texts to store in files, usually with `workflow`; None if none was posted."""
    dynprompt = "DYNPROMPT"
    """The prompt while it runs, with the nodes that expansion has added."""
    auth_token_comfy_org = "AUTH_TOKEN_COMFY_ORG"
    """Token of a paid service, if the editor sent one."""
    api_key_comfy_org = "API_KEY_COMFY_ORG"
    """Key of a paid service, if the editor sent one."""


class HiddenHolder:
    """The hidden values of one execution, as attributes; whatever was not asked for is None."""

    def __init__(
        self,
        unique_id: str | None = None,
        prompt: Any = None,
        extra_pnginfo: Any = None,
        dynprompt: Any = None,
        auth_token_comfy_org: str | None = None,
        api_key_comfy_org: str | None = None,
        **more: Any,
    ) -> None:
        self.unique_id = unique_id
        self.prompt = prompt
        self.extra_pnginfo = extra_pnginfo
        self.dynprompt = dynprompt
        self.auth_token_comfy_org = auth_token_comfy_org
        self.api_key_comfy_org = api_key_comfy_org
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle probe for special methods
            raise AttributeError(name)
        return None

    @classmethod
    def from_dict(cls, values: Mapping[Any, Any] | None) -> HiddenHolder:
        """Values by name, or by `Hidden` member, as an object."""
        named = {}
        for key, value in (values or {}).items():
            named[key.name if isinstance(key, Hidden) else _name_of(str(key))] = value
        return cls(**named)


def _name_of(key: str) -> str:
    """The attribute for a hidden value given by attribute name or by wire name."""
    return next((member.name for member in Hidden if member.value == key), key)
