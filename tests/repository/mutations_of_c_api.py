"""The mutations of the C API's headers and command; part of mutations.py's."""

from mutant import Mutant, package

HEADERS = "capi/test_headers.py"
COMMAND = "cli/test_capi_command.py"


C_API = [
    package("lengths of the sparse operators are arrays in C too", "ops/shared/prototypes.py",
          'r"actualSeq|cuSeq|(?i:seqUsed)|cmpResidual|startPos"', 'r"PaddingSize"',
          f"{HEADERS}::test_declarations_are_what_the_pages_print"),
    package("gradients are declared beside the forwards", "contract/record.py",
          "{'_grad' if 'Grad' in name else ''}", "",
          f"{HEADERS}::test_every_operator_is_declared_and_defined_once_in_its_file"),
    Mutant("a header that declares its operators once for each include", "codegen/headers.py",
           "#pragma once\\n", "", (f"tests/{HEADERS}::test_what_is_there_is_what_the_records_give",)),
    package("operators have C++ names in C++ programs", "capi/include/aclnn/aclnn_base.h",
          'extern "C" ACL_FUNC_VISIBILITY', "ACL_FUNC_VISIBILITY",
          f"{HEADERS}::test_programs_in_c_and_in_cpp_call_the_same_functions"),
    package("flags of a folder with a space in its name", "capi/environment.py",
          'return shlex.join([f"-L{LIBRARY}"', 'return " ".join([f"-L{LIBRARY}"',
          f"{COMMAND}::test_flags_are_one_line_that_a_shell_reads"),
]  # fmt: skip
