"""An alias of the module explorer.violations under its former name, for one release."""

import sys

from fusion_attention.explorer import violations

sys.modules[__name__] = violations
