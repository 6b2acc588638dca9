# Decides CCCLIB_HAVE_CUDA from CCCLIB_CUDA and what the machine has, and enables the language.
set(CCCLIB_HAVE_CUDA OFF)
if(NOT CCCLIB_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CCCLIB_CUDA = '${CCCLIB_CUDA}'; allowed: AUTO, ON, OFF")
endif()
# A CUDA compiler that is named but broken must be an error, not a quiet CPU build.
if(DEFINED CMAKE_CUDA_COMPILER AND NOT EXISTS "${CMAKE_CUDA_COMPILER}" AND NOT CCCLIB_CUDA STREQUAL "OFF")
  message(FATAL_ERROR "CMAKE_CUDA_COMPILER='${CMAKE_CUDA_COMPILER}' does not exist: name an nvcc that "
    "does, or build the CPU parts alone with CCCLIB_CUDA=OFF.")
endif()
if(NOT CCCLIB_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CCCLIB_HAVE_CUDA ON)
  elseif(CCCLIB_CUDA STREQUAL "ON" OR DEFINED ENV{CUDACXX})
    message(FATAL_ERROR
      "CCCLIB_CUDA=${CCCLIB_CUDA}, CUDACXX='$ENV{CUDACXX}': no working CUDA compiler. Put nvcc on "
      "PATH, set CUDACXX to it, or build the CPU parts alone with CCCLIB_CUDA=OFF.")
  endif()
endif()
if(CCCLIB_HAVE_CUDA)
  # Machine code for A100 and H100/H200, and PTX from which the driver makes that of later ones.
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "GPU architectures to compile for")
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
message(STATUS "CUDA compiler: ${CCCLIB_HAVE_CUDA} (CCCLIB_CUDA=${CCCLIB_CUDA})")
