"""What nodes show and save, under the module name that some packages import."""

from comfy_api.latest.ui import *  # noqa: F403 - the public names are listed there
from comfy_api.latest.ui import __all__  # noqa: F401
