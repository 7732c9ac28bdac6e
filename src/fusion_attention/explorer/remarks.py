"""The former name of explorer.violations, for one release."""

import sys

from fusion_attention.explorer import violations

sys.modules[__name__] = violations
