#!/bin/sh
# Looks at what the compiler made: check_objects.sh CHECK OBJECT. Each check first makes sure that it sees anything.
set -eu
check=$1
object=$2

code() { "${OBJDUMP:-objdump}" -d --no-show-raw-insn "$object"; }
count() { code | grep -cE "$1" || true; }

fail() {
  echo "$object: $*" >&2
  exit 1
}

# $1: what must occur; $2: what must not.
expect() {
  seen=$(count "$1")
  bad=$(count "$2")
  echo "$object: $seen lines match '$1', $bad match '$2'"
  [ "$seen" -ge 50 ] || fail "too few lines to judge by"
  [ "$bad" -eq 0 ] || fail "$(code | grep -E "$2" | head -5)"
}

case $check in
  no_fused_multiply_add)  # mulps, vmulss, ...; on Arm: fmul v0.4s, s0
    expect '[[:space:]](v?mul[ps]s|fmul)[[:space:]]' '[[:space:]](vfn?m(add|sub)|fn?m(la|ls|add|sub))' ;;
  registers_avx2) expect '%ymm' '%zmm' ;;
  registers_avx512) expect '%zmm' '%none' ;;
  registers_neon) expect 'v[0-9]+\.4s' '[[:space:]]z[0-9]+\.s' ;;
  one_symbol)
    # What isn't local could be chosen by the linker for code that runs on older processors.
    symbols=$("${NM:-nm}" --defined-only --extern-only "$object")
    echo "$symbols"
    case $symbols in
      *"
"*) fail "defines more than its table" ;;
      *Kernels*) ;;
      *) fail "does not define its table" ;;
    esac ;;
  *) fail "unknown check $check" ;;
esac
