"""The mutations of decode on GPUs; part of mutations.py's."""

from mutant import package

KERNEL, PAGES, LAUNCH = (f"backends/triton/{name}.py" for name in ("decode/kernel", "common/pages", "decode/launch"))
CACHES = "kernels/test_decode.py::test_caches"
LIST = "kernels/test_decode.py::test_every_row_meets_every_key_that_it_sees_in_one_entry"
DECODES = [
    package("Triton: decode takes a cut tile for a whole one", KERNEL,
          "(j0 + BN > full_end)", "(j0 > full_end)", CACHES),
    package("Triton: the page of the turn before", KERNEL,
          "b * step, last, j0 + BN, end,", "b * step, last, j0, end,", CACHES),
    package("Triton: odd columns of int8 values are the even ones", PAGES,
          "stored((pairs >> 8).to(tl.int8), like)", "stored(pairs.to(tl.int8), like)", CACHES),
    package("Triton: offsets of keys count nothing", PAGES,
          "return (y0, y1, y2), added * unit, unit", "return (y0, y1, y2), added * 0.0, unit", CACHES),
    package("Triton: float16 flushes what small scales leave of weights", PAGES,
          "(2.0**-14))\n        safe = safe_unit(now)", "(2.0**-14))\n        safe = safe_unit(now * 0.0)",
          "kernels/test_decode.py::test_scales_of_any_size_leave_float16_its_digits"),
    package("Triton: scales of keys that no row sees set the unit", PAGES,
          "tl.where(tl.max(p, 0) > 0.0, scales, 0.0)", "tl.where(tl.max(p, 0) >= 0.0, scales, 0.0)",
          "kernels/test_decode.py::test_scales_of_keys_before_a_window_count_nothing"),
    package("Triton: a share reaches into the next one", LAUNCH,
          "np.minimum(start + per, end[of]), count)", "np.minimum(start + per + size, end[of]), count)", LIST),
    package("Triton: shares are as many as the longest sequence asks", LAUNCH,
          "-(-int(turns.sum()) // wanted), LEAST_TILES", "LEAST_TILES", LIST),
]  # fmt: skip
