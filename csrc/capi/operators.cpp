// The C functions of all operators. They were written from the records; each hands its arguments to plan() or run().
#include "capi/entry.h"  // IWYU pragma: keep

#include "capi/operators.inc"
