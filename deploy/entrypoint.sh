#!/bin/sh
# The arguments of the image, as TorchServe's image takes them:
#
#   (none) | serve            the bundled configuration, tokens off
#   torchserve --start ...    a command line for TorchServe; kept in the foreground, so that the container lives and
#                             dies with its server (TorchServe's image goes on without one)
#   'torchserve --start ...'  the same as one word; TorchServe's image evaluates it
#   words with $NAME in them, or with &, | or ; between them, are for the shell, as there: Docker itself fills nothing
#                             in, and a variable may hold several words
#   anything else             is run as it is
set -eu

home=/home/model-server

set -f # nothing here looks for file names; what is run in the end does as it likes
if [ $# -eq 1 ]; then
  case $1 in
    *[\;\&\|\`\<\>\(\)]*) exec sh -c "$1" ;;
    torchserve\ * | serve\ *) # its lines are one; each of them by itself would be run here
      line=$(printf '%s\n' "$1" | sed 's/\\$//' | tr '\n' ' ')
      eval "set -- $line"
      ;;
    *[\$\'\"]*) exec sh -c "$1" ;;
    *) # words separated by blanks
      # shellcheck disable=SC2086
      set -- $1
      ;;
  esac
else
  for word; do
    case $word in '&' | '&&' | '|' | '||' | ';') exec sh -c "$*" ;; esac
  done
  case ${1-} in
    torchserve | serve)
      for word; do
        case $word in
          *\$*) eval "set -- \"\$@\" $word" ;;
          *) set -- "$@" "$word" ;;
        esac
        shift
      done
      ;;
  esac
fi

if [ $# -eq 0 ] || [ "$1" = serve ]; then
  [ $# -eq 0 ] || shift
  set -- torchserve --start --ts-config "$home/config.properties" --disable-token-auth "$@"
fi

if [ "$1" = torchserve ]; then
  case " $* " in
    *' --foreground '* | *' --stop '* | *' -v '* | *' --version '* | *' -h '* | *' --help '*) ;;
    *) shift && set -- torchserve --foreground "$@" ;;
  esac
fi

exec "$@"
