#!/usr/bin/env bash
# Run the tests of the core under programs that watch every access to memory:
#
#   valgrind   the kernels as they are compiled, portable and AVX2 (it shows programs a CPU without AVX-512)
#   miri       Rust's own rules (borrows, lifetimes, data races) where unsafe code is no intrinsic: the worker pool, the
#              arena of blocks, the weights' memory, and the portable kernels on top of them
#
# Both are slow: property tests run few cases (PROPTEST_CASES, 2 by default). valgrind is a package of Debian's. Miri is
# a component of nightly Rust; where it is not installed it is left out, unless it is asked for by name.
# usage: test_memory.sh [valgrind | miri]...      (default: valgrind, and miri if it is there)
set -euo pipefail
cd "$(dirname "$0")/.."
export PROPTEST_CASES=${PROPTEST_CASES:-2}

# A program that hangs must not hang the run.
LIMIT=900
TESTS=(--lib --test attention --test attention_fuzz --test formats --test linear_ops --test linear_products)
# Tests that compare bits of hundreds of calls, all of a kind that others make once.
SKIPPED=(a_tree_is_its_paths a_rows_bits_depend_on_nothing_beside_it trap_16 long_sequences token_scales_follow
  a_row_is_the_same_in_every_slot threads_and_cutting)

fail() {
  printf 'test-memory: %s\n' "$@" >&2
  exit 1
}

# Install valgrind if it is missing, or say how.
require_valgrind() {
  if command -v valgrind >/dev/null; then
    return
  fi
  if ! command -v apt-get >/dev/null || (($(id -u) != 0)); then
    fail "valgrind is missing; install it as root:" "  apt-get install --no-install-recommends valgrind"
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends valgrind >/dev/null
}

test_valgrind() {
  require_valgrind
  local built program programs=() failed=0 skip=("${SKIPPED[@]/#/--skip=}")
  built=$(cargo test --locked --no-run --message-format=json "${TESTS[@]}" |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
  mapfile -t built <<<"$built"
  # Side by side: valgrind runs one thread at a time.
  for program in "${built[@]}"; do
    watch "$program" "${skip[@]}" &
    programs+=($!)
  done
  for program in "${programs[@]}"; do
    wait "$program" || failed=$((failed + 1))
  done
  ((failed == 0)) || fail "$failed programs failed under valgrind"
}

# watch PROGRAM ARGUMENT...: under valgrind; what it says comes at its end.
watch() {
  local name said status=0 start=$SECONDS
  name=$(basename "$1")
  # Fair turns: threads that wait for each other in a loop would keep the only turn that there is.
  said=$(timeout "$LIMIT" valgrind --quiet --error-exitcode=9 --fair-sched=yes --leak-check=full \
    --errors-for-leak-kinds=definite --show-leak-kinds=definite "$@" --quiet 2>&1) || status=$?
  printf '%s\n' "--- valgrind $name: $((SECONDS - start)) s" "$said"
  return "$status"
}

has_miri() {
  RUSTUP_AUTO_INSTALL=0 cargo +nightly miri --version >/dev/null 2>&1
}

test_miri() {
  has_miri || fail "Miri is missing; install it: rustup toolchain install nightly --component miri,rust-src"
  local of
  # Files and mappings are the system's. Tests that expect a panic need no backtrace, for which Miri takes minutes.
  export MIRIFLAGS=${MIRIFLAGS:--Zmiri-disable-isolation -Zmiri-env-set=RUST_BACKTRACE=0}
  export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
  # (What no memory holds is not asked for: the interpreter ends there.)
  for of in threads:: storage::arena:: linear::buffer::tests::buffers attention::; do
    echo "--- miri $of"
    timeout --foreground "$LIMIT" cargo +nightly miri test --locked --quiet --lib "$of" || fail "$of failed under Miri"
  done
}

for part in "$@"; do
  [[ $part =~ ^(valgrind|miri)$ ]] || fail "$part: expected valgrind or miri"
done
if (($# == 0)); then
  set -- valgrind
  if has_miri; then
    set -- valgrind miri
  else
    echo "--- miri is not installed: left out"
  fi
fi
for part in "$@"; do
  "test_$part"
done
