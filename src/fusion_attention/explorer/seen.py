"""An alias of the module explorer.visible under its former name, for one release."""

import sys

from fusion_attention.explorer import visible

sys.modules[__name__] = visible
