"""Socket types and schemas, under the module name that some packages import."""

from comfy_api.latest.io import *  # noqa: F403 - the public names are listed there
from comfy_api.latest.io import __all__  # noqa: F401
