#!/usr/bin/env bash
# Intrinsics that are functions of their own in the release build. The compiler inlines one only into what is compiled for
# its instructions; a closure that is lent to others is not, and then each of its instructions is a call.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v nm >/dev/null || { echo "check_inlined: expected nm (Debian: binutils), found none" >&2; exit 2; }
build=target/inlined
CARGO_PROFILE_RELEASE_STRIP=none cargo build --release --locked --target-dir "$build" \
  -p kvcore-py --features pyo3/extension-module
library=$(find "$build/release" -maxdepth 1 -name 'lib*kvcore*.so' -o -maxdepth 1 -name 'lib*kvcore*.dylib' | head -n 1)
names=$(nm --demangle "$library")
grep -q ' kvcore::attention::' <<<"$names" || { echo "check_inlined: expected names in $library, found none" >&2; exit 2; }

# Of those that are used once, to find out what the CPU has, nothing depends.
if calls=$(grep -E ' (core|std)::core_arch::|core_arch::(x86|arm|aarch64)' <<<"$names" | grep -v '::_xgetbv'); then
  echo "$calls" | sed -E 's/^[0-9a-f]* *[a-zA-Z] //' | sort -u >&2
  echo "check_inlined: expected every intrinsic inlined; these are functions" >&2
  exit 1
fi
echo "every intrinsic is inlined"
