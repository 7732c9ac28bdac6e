#!/bin/sh
# The compiler of release/zig.cmake: "$@" with the options that zig knows.
for word; do
  shift
  case $word in
    -march=x86-64-v*) word=-march=x86_64_v${word##*v} ;;
    -march=armv8.2-a+*) word=-mcpu=generic+v8_2a+${word#*+} ;;
    -bundle) word=-shared ;; # Python loads both kinds; zig 0.17.1 cannot link the first
    -Wl,@*) word=-Wl,-undefined,dynamic_lookup ;; # nanobind's list of Python's names, for macOS
  esac
  set -- "$@" "$word"
done
exec "$@"
