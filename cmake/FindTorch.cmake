# Sets TORCH_PATH to the installed torch package. Its headers and libtorch are used; the package is not imported.
if(NOT TORCH_PATH)
  find_program(python_for_torch NAMES python3 python REQUIRED)
  execute_process(
    COMMAND ${python_for_torch} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE TORCH_PATH OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${TORCH_PATH}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "gptkernels needs an installed torch >= 2.10 (looked in '${TORCH_PATH}'): "
                      "install torch first, or give -DTORCH_PATH=.../site-packages/torch")
endif()
# gcc names system headers by their real paths, which -ffile-prefix-map must match.
get_filename_component(TORCH_PATH "${TORCH_PATH}" REALPATH)
file(STRINGS "${TORCH_PATH}/version.py" version_line REGEX "^__version__ *=")
string(REGEX REPLACE ".*['\"](.*)['\"].*" "\\1" TORCH_VERSION "${version_line}")
if(TORCH_VERSION VERSION_LESS 2.10)
  message(FATAL_ERROR "gptkernels needs torch >= 2.10, found ${TORCH_VERSION} in ${TORCH_PATH}")
endif()
message(STATUS "gptkernels: torch ${TORCH_VERSION} in ${TORCH_PATH}")
