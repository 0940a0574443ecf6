"""A pack that tries to end the server while it loads; the server must go on without it."""

import sys

sys.exit("this pack ends every program that loads it")
