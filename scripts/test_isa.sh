#!/usr/bin/env bash
# Run the tests of the kernels on instruction sets that this machine may not have, under qemu's user-mode emulation:
#
#   aarch64  -cpu max, cortex-a72    NEON with every extension, and the oldest form (needs an aarch64 standard library)
#   x86-64   -cpu Haswell            AVX2, no AVX-512
#   x86-64   -cpu Nehalem            no AVX: the portable level; also the Python extension, which must import
#
# Emulation is slow: property tests run few cases (PROPTEST_CASES, 4 by default). Debian 12 or newer.
# usage: test_isa.sh [aarch64 | x86_64 | python]...      (default: all)
set -euo pipefail
cd "$(dirname "$0")/.."
export PROPTEST_CASES=${PROPTEST_CASES:-4}

# A program of qemu's that deadlocks must not hang the run.
LIMIT=1800
TESTS=(--lib --test formats --test attention --test linear_ops --test linear_products --test linear_quantized)
PACKAGES=(qemu-user)
# Without the features that qemu lacks and warns about.
HASWELL=Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid
ARM_PACKAGES=(rustc-web gcc-aarch64-linux-gnu libc6-dev-arm64-cross libstd-rust-web-dev:arm64)

fail() {
  printf 'test-isa: %s\n' "$@" >&2
  exit 1
}

# Install what is missing, or say how.
require() {
  local missing=()
  for package in "$@"; do
    dpkg-query --show --showformat '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    return
  fi
  if (($(id -u) != 0)); then
    fail "these packages are missing; install them as root:" "  dpkg --add-architecture arm64 && apt-get update" \
      "  apt-get install --no-install-recommends ${missing[*]}"
  fi
  dpkg --add-architecture arm64
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# The test programs that cargo has built: their paths, one a line.
programs() {
  cargo test --locked --no-run --message-format=json "${TESTS[@]}" "$@" |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

# emulate QEMU CPU PROGRAM...
emulate() {
  local qemu=$1 cpu=$2 program
  shift 2
  for program in "$@"; do
    echo "--- $qemu -cpu $cpu $(basename "$program")"
    timeout --foreground "$LIMIT" "$qemu" -cpu "$cpu" "$program" --quiet ||
      fail "$(basename "$program") failed under $qemu -cpu $cpu"
  done
}

test_aarch64() {
  require "${PACKAGES[@]}" "${ARM_PACKAGES[@]}"
  local built
  # Debian's compiler has the aarch64 library; cargo is whichever there is. Linked statically: a dynamically linked
  # program hangs in pthread_create under the emulator.
  built=$(
    export RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"
    programs --target aarch64-unknown-linux-gnu --target-dir target/aarch64
  )
  mapfile -t built <<<"$built"
  emulate qemu-aarch64 max "${built[@]}"
  emulate qemu-aarch64 cortex-a72 "${built[@]}"
}

test_x86_64() {
  require "${PACKAGES[@]}"
  local built
  built=$(programs)
  mapfile -t built <<<"$built"
  emulate qemu-x86_64 "$HASWELL" "${built[@]}"
  emulate qemu-x86_64 Nehalem "${built[@]}"
}

test_python() {
  require "${PACKAGES[@]}"
  make --no-print-directory develop >/dev/null 2>&1 || make develop
  local cpu status again
  echo "--- python on Haswell and Nehalem"
  for cpu in "$HASWELL avx2" "Nehalem scalar"; do
    for again in yes no; do
      status=0
      timeout --foreground "$LIMIT" qemu-x86_64 -cpu ${cpu% *} .venv/bin/python tests/old_cpu.py ${cpu#* } || status=$?
      # The emulator has ended one run of more than a hundred by a signal, for no reason that was found: threads and their signals
      # are not its strength. An instruction that the CPU lacks ends every run.
      if ((status < 128)) || [[ $again == no ]]; then
        break
      fi
      echo "ended by signal $((status - 128)); once more"
    done
    ((status == 0)) || fail "kvcore failed in Python under qemu-x86_64 -cpu ${cpu% *}"
  done
}

if ! command -v dpkg-query apt-get >/dev/null || [[ $(uname -m) != x86_64 ]]; then
  fail "needs Debian 12 or newer on x86-64: qemu-user and an aarch64 standard library for Rust come from its packages"
fi
if (($# == 0)); then
  set -- x86_64 python aarch64
fi
for part in "$@"; do
  [[ $part =~ ^(aarch64|x86_64|python)$ ]] || fail "$part: expected aarch64, x86_64 or python"
done
for part in "$@"; do
  "test_$part"
done
