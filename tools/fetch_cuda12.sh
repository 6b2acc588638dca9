#!/usr/bin/env bash
# A CUDA 12 compiler where none is installed: unpacks Debian's packages into a folder that CUDA_HOME
# can name. Needs apt (as any user), 1.1 GB of downloads and 3 GB while it works. It knows sm_80 and
# sm_90; NVIDIA's own 12.8 and newer know sm_100 and sm_120 too.
# Usage: tools/fetch_cuda12.sh FOLDER
set -euo pipefail
home=$(realpath -m "$1")
[ -x "$home/bin/nvcc" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache,new} "$(dirname "$home")"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] http://deb.debian.org/debian trixie main contrib non-free" >"$work/sources.list"
cd "$work"
apt=(apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" download nvidia-cuda-toolkit nvidia-cuda-dev libcudart12 libcu++-dev
dpkg-deb --fsys-tarfile nvidia-cuda-toolkit_*.deb | tar -x -C new ./usr/bin ./usr/lib/nvidia-cuda-toolkit
dpkg-deb --fsys-tarfile nvidia-cuda-dev_*.deb | tar -x -C new --wildcards ./usr/include \
  './usr/lib/*/libcudart*' './usr/lib/*/libcudadevrt.a'
dpkg-deb --fsys-tarfile libcudart12_*.deb | tar -x -C new --wildcards './usr/lib/*/libcudart.so*'
dpkg-deb --fsys-tarfile libcu++-dev_*.deb | tar -x -C new ./usr/include

mkdir -p cuda/{bin,lib64,nvvm/bin}
cp new/usr/bin/{__nvcc_device_query,bin2c,cuobjdump,cudafe++,fatbinary,nvdisasm,nvlink,ptxas} cuda/bin/
cp -r new/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} cuda/bin/
cp new/usr/lib/nvidia-cuda-toolkit/bin/cicc cuda/nvvm/bin/
cp -r new/usr/lib/nvidia-cuda-toolkit/libdevice cuda/nvvm/
cp -r new/usr/include cuda/
cp -P new/usr/lib/*/libcuda* cuda/lib64/
# NVIDIA's layout, whose files find each other from where nvcc is.
cat >cuda/bin/nvcc.profile <<'PROFILE'
TOP              = $(_HERE_)/..
CICC_PATH        = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib64:
PATH            += $(CICC_PATH):$(_HERE_):
INCLUDES        += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES       =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
mv cuda "$home"
