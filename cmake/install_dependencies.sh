#!/bin/sh
# Installs what the project needs on Debian and Ubuntu, if it is not there yet.
# Usage: install_dependencies.sh GROUP...   with GROUP one of: build mpi lint clang bench docs
# Needs root or sudo only when a package is missing. Elsewhere it prints the list and goes on.
set -eu

packages=
for group in "$@"; do
  case $group in
    build) packages="$packages g++ ccache cmake ninja-build python3 python3-dev python3-venv libboost-dev
      libboost-program-options-dev libhdf5-dev libhwy-dev libssl-dev nlohmann-json3-dev
      libxxhash-dev libgtest-dev libgmock-dev" ;;
    lint) packages="$packages clang-format clang-tidy" ;;
    clang) packages="$packages clang" ;;
    mpi) packages="$packages openmpi-bin libopenmpi-dev mpich libmpich-dev" ;;
    bench) packages="$packages openmpi-bin libopenmpi-dev mpich libmpich-dev libgloo-dev
      hdf5-tools iproute2" ;;
    docs) packages="$packages doxygen" ;;
    *) echo "install_dependencies: unknown group '$group': use build, mpi, lint, clang, bench or docs" >&2
       exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null 2>&1; then
  echo "install_dependencies: not a Debian system; make sure that these are there:" $packages >&2
  exit 0
fi

missing_of() {
  missing=
  for package in "$@"; do
    case $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) in
      installed*) ;;
      *) missing="$missing $package" ;;
    esac
  done
}

install_packages() {
  missing_of "$@"
  [ -n "$missing" ] || return 0
  as_root=
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
      echo "install_dependencies: run as root, or install:$missing" >&2
      exit 1
    fi
    as_root=sudo
  fi
  echo "install_dependencies: installing$missing"
  for attempt in 1 2 3; do
    if $as_root apt-get update -qq &&
       $as_root env DEBIAN_FRONTEND=noninteractive \
         apt-get install -y -qq --no-install-recommends $missing >/dev/null </dev/null; then
      return 0
    fi
    echo "install_dependencies: attempt $attempt failed" >&2
    sleep 5
  done
  exit 1
}

install_packages $packages
case " $* " in
  *" clang "*)  # the sanitizer runtimes carry the compiler's version in their name
    install_packages "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev" ;;
esac
