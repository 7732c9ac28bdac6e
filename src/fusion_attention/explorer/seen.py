"""The former name of explorer.visible, for one release."""

import sys

from fusion_attention.explorer import visible

sys.modules[__name__] = visible
