"""The explorer's rules: the page's JavaScript equals its Python source, and the rules match real calls."""

import json
import random

import pytest
import quickjs
from support.explorer_settings import BY_SCRIPT, argument, by_python, random_setting

from fusion_attention.explorer.page import rules
from fusion_attention.explorer.visible import MODES

SETTINGS = 400


@pytest.fixture(scope="module")
def script() -> quickjs.Context:
    context = quickjs.Context()
    context.eval(rules())
    context.eval(BY_SCRIPT)
    return context


@pytest.mark.parametrize("mode", MODES)
def test_javascript_rules_equal_python_rules(script: quickjs.Context, mode: int) -> None:
    rng = random.Random(mode)
    for _ in range(SETTINGS // len(MODES)):
        s = random_setting(rng, modes=(mode,))
        assert json.loads(script.eval(f"everything({argument(s)})")) == json.loads(json.dumps(by_python(s))), s
