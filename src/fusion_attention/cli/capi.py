"""`fusion-attention capi`: prints compiler flags and paths of the C API."""

import typer

from fusion_attention.cli.output import refuse, show_json


def capi(
    cflags: bool = typer.Option(False, "--cflags", help="Flags of the compiler."),
    libs: bool = typer.Option(False, "--libs", help="Flags of the linker; programs need no LD_LIBRARY_PATH."),
    prefix: bool = typer.Option(False, "--prefix", help="The root folder, for ASCEND_CUSTOM_PATH of CANN's builds."),
    include_dir: bool = typer.Option(False, "--include-dir", help="The folder of acl/acl.h and aclnnop/aclnn_*.h."),
    lib_dir: bool = typer.Option(False, "--lib-dir", help="The folder of libascendcl.so, libnnopbase and libopapi."),
    cmake_dir: bool = typer.Option(False, "--cmake-dir", help="For CMAKE_PREFIX_PATH: find_package(fusion_attention)."),
    pkg_config_dir: bool = typer.Option(False, "--pkg-config-dir", help="For PKG_CONFIG_PATH: fusion_attention.pc."),
    as_json: bool = typer.Option(False, "--json", help="All of these as JSON, and which libraries are missing."),
) -> None:
    """Print the compiler flags and folders to build a C or C++ program for CANN with this library.

    \b
    cc program.c $(fusion-attention capi --cflags --libs)
    cmake -S . -B build -DCMAKE_PREFIX_PATH=$(fusion-attention capi --cmake-dir)
    ASCEND_CUSTOM_PATH=$(fusion-attention capi --prefix) cmake -S . -B build
    """
    from fusion_attention.capi import environment

    if libs and environment.missing():
        lacks = ", ".join(path.name for path in environment.missing())
        refuse(
            "capi", f"{lacks}: not in {environment.LIBRARY}; wheels for Linux have them: pip install fusion-attention"
        )
    results = {
        "prefix": str(environment.ROOT),
        "include_dir": str(environment.INCLUDE),
        "lib_dir": str(environment.LIBRARY),
        "cmake_dir": str(environment.CMAKE),
        "pkg_config_dir": str(environment.PKG_CONFIG),
    }
    if as_json:
        flags = {"cflags": environment.cflags(), "libs": environment.libs(), "missing": environment.missing()}
        show_json({**results, **flags})
        return
    wanted = (prefix, include_dir, lib_dir, cmake_dir, pkg_config_dir)
    lines = [line for line, one in zip(results.values(), wanted, strict=True) if one]
    flags_line = " ".join([environment.cflags()] * cflags + [environment.libs()] * libs)
    lines += [flags_line] * bool(flags_line)
    if not lines:
        refuse("capi", "expected an option: --cflags, --libs, --prefix ... (fusion-attention capi --help lists them)")
    typer.echo("\n".join(lines))
