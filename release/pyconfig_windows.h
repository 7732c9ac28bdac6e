// CPython's pyconfig.h for Windows on x86-64, as far as headers of the stable ABI read it. Its other headers are the same
// on all systems (release/cross.py).

#pragma once

#include <stdio.h>

#define MS_WINDOWS
#define Py_ENABLE_SHARED 1  // functions of Python are imported from a DLL

#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_WCHAR_T 2
#define ALIGNOF_MAX_ALIGN_T 16

#define HAVE_SYS_STAT_H 1
#define HAVE_WCHAR_H 1
