"""torch_npu.testing: test cases and helpers, based on unittest."""

import os
import random
import unittest
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

CASES = ("TestCase", "run_tests")
HELPERS = ("SkipIfNotGteCANNVersion", "SupportedDevices", "create_common_tensor", "get_npu_device", "set_npu_device")


def get_npu_device() -> str:
    """Returns the device of tests: "npu:0", or the number in the environment variable SET_NPU_DEVICE."""
    return f"npu:{os.environ.get('SET_NPU_DEVICE', '0')}"


def set_npu_device() -> str:
    """Makes get_npu_device() the current device, and returns its name."""
    device = get_npu_device()
    torch.npu.set_device(device)  # type: ignore[attr-defined]  # exists after install()
    return device


def create_common_tensor(
    item: Sequence[Any], minValue: float, maxValue: float, device: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uniform random values as a tensor on the CPU, and a copy on the device.

    Args:
        item: (numpy dtype, format, shape); the format of the chip's memory has no effect.
        minValue, maxValue: the range of values.
        device: the copy's device; None: get_npu_device().
    """
    dtype, _, shape = item
    values = torch.from_numpy(np.random.uniform(minValue, maxValue, shape).astype(dtype))  # noqa: NPY002
    return values, values.to(device or get_npu_device(), copy=True)


def SupportedDevices(supported_devices: Sequence[str]) -> Callable[..., Any]:
    """Returns a decorator of tests for certain Ascend NPUs, which returns the test unchanged: it runs everywhere."""
    return lambda test: test


def SkipIfNotGteCANNVersion(version: str) -> Callable[..., Any]:
    """Returns a decorator of tests for a version of CANN or later, which returns the test unchanged."""
    return lambda test: test


def _values(given: Any) -> np.ndarray:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        return (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    return np.asarray(given)


class TestCase(unittest.TestCase):
    """unittest.TestCase with seeds set before every test, and comparisons of tensors."""

    maxDiff = None
    precision = 1e-5
    npu_device: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        """Makes the device of tests the current one, and stores its name."""
        cls.npu_device = set_npu_device()

    def setUp(self) -> None:
        """Seeds torch and Python with SEED from the environment, or 666."""
        seed = int(os.environ.get("SEED", "666"))
        torch.manual_seed(seed)
        random.seed(seed)

    def assertRtolEqual(
        self,
        x: Any,
        y: Any,
        prec: float = 1e-4,
        prec16: float = 1e-3,
        auto_trans_dtype: bool = False,
        message: Any = None,
    ) -> None:
        """Fails if shapes, dtypes or positions of NaN differ, or if too many elements differ.
        With p = prec (prec16 for float16 and bfloat16), too many elements differ if |x - y| > p for more than a
        fraction p of them, and |x - y| > p * max(|x|, |y|) for more than a fraction p of them."""
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            self.assertEqual(len(x), len(y), message)
            for one, other in zip(x, y, strict=True):
                self.assertRtolEqual(one, other, prec, prec16, auto_trans_dtype, message)
            return
        a, b = _values(x), _values(y)
        self.assertEqual(a.shape, b.shape, message)
        if auto_trans_dtype:
            a = a.astype(b.dtype)
        self.assertEqual(a.dtype, b.dtype, message)
        half = a.dtype == np.float16 or any(getattr(t, "dtype", None) == torch.bfloat16 for t in (x, y))
        limit = prec16 if half else prec
        p, q = a.astype(np.float64), b.astype(np.float64)
        self.assertTrue(np.array_equal(np.isnan(p), np.isnan(q)), message or "NaN at different positions")
        same = (p == q) | np.isnan(p)
        apart = np.abs(np.where(same, 0.0, p) - np.where(same, 0.0, q))
        relative = (apart > limit * np.maximum(np.abs(p), np.abs(q))) | np.isinf(apart)
        far = min(int((apart > limit).sum()), int(relative.sum()))
        self.assertLessEqual(far, limit * a.size, message or f"{far} of {a.size} elements are too far apart")

    def assertEqual(self, first: Any, second: Any, msg: Any = None, **options: Any) -> None:
        """Does unittest's assertEqual; a tensor is compared within `precision`, or the option `prec`."""
        prec = options.pop("prec", None)
        if isinstance(msg, float):
            prec, msg = msg, options.pop("message", None)
        if not (isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor)):
            super().assertEqual(first, second, msg)
            return
        one, other = torch.as_tensor(first), torch.as_tensor(second)
        limit = self.precision if prec is None else prec
        torch.testing.assert_close(
            one.cpu(), other.cpu(), rtol=0, atol=limit, equal_nan=True, check_dtype=False, msg=msg
        )


def run_tests() -> None:
    """Runs the tests of the program."""
    unittest.main()
