// The C functions of all operators. They were written from the records; each hands its arguments to plan() or run().
#include "capi/entry.h"

#include "capi/operators.inc"
