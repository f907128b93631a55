#!/bin/sh
# The arguments of the image, as TorchServe's image takes them:
#
#   (none) | serve            the bundled configuration, tokens on (TorchServe's image switches them off); `serve` with a
#                             folder /opt/ml/model or /opt/ml/models: those of SageMaker
#   torchserve --start ...    a command line for TorchServe; kept in the foreground, so that the container lives and
#                             dies with its server (TorchServe's image goes on without one)
#   'torchserve --start ...'  the same, however its words are cut: TorchServe's image joins them and evaluates the line
#   words with $NAME in them, or with &, | or ; between them, variables and shell commands in front, are for the shell,
#                             as there: Docker itself fills nothing in, and a variable may hold several words. A server
#                             that the shell leaves in the background is stayed with until it ends
#   a script, if `torchserve` is in its text, is stayed with likewise
#   anything else             is run as it is
set -eu

home=/home/model-server

# starts_server COMMAND ...: a word of it names the server, or is a file with the name at its head, as a script is
starts_server() {
  case $* in *torchserve*) return ;; esac
  # A line for the shell is one word, and has words of its own.
  for word in $(printf '%s' "$*" | tr "\"';&|()" ' ') "$(command -v "$1")"; do
    ! [ -f "$word" ] || ! head -c 65536 "$word" 2> /dev/null | grep -q torchserve || return 0
  done
  return 1
}

# stay COMMAND ...: run it, and stay until the server that it leaves in the background ends. A SIGTERM is for both, as a
# shell that waits for a server with --foreground ends at once.
stay() {
  starts_server "$@" || exec "$@"
  told='' due='' status=0 ended=0
  exec 3<&0
  "$@" <&3 3<&- & # of itself, the shell gives what it starts in the background no input
  started=$!
  trap 'told=1 due=1; kill "$started" 2> /dev/null || :' TERM INT
  wait "$started" || status=$?
  trap 'told=1 due=1' TERM INT
  [ "$status" -eq 0 ] || [ "$told" ] || exit "$status"
  if ! server=$(python -c "$left_running" "$told" 2> /dev/null); then
    # A shell that became the server may have drained by now, and the signal has cut the wait for its status short.
    if [ "$told" ]; then
      wait "$started" || ended=$?
      [ "$ended" -eq 127 ] || status=$ended # 127: its status is known already
    fi
    exit "$status"
  fi
  [ "$server" != "$started" ] || due='' # the shell has become the server, which has the signal
  stop='torchserve --stop' # it sends no second signal, so that a script may stop the server itself
  while kill -0 "$server" 2> /dev/null; do
    # Each signal is passed on once, also one that came while Python ran: at a second one the server does not drain.
    [ -z "$due" ] || { due='' && $stop > /dev/null 2>&1 || :; stop="kill $server"; }
    sleep 0.2 &
    wait $! || : # a trap runs at once in a wait, and after a sleep
  done
  [ "$told" ] || exit 1
  exit 0
}
left_running='
import os, sys
from torchere.serving.commands.torchserve import pid_file, pid_without_file, read_pid, running
file = pid_file(os.environ)
pid = read_pid(file)
if not running(pid):  # a script that has the signal, too, may have stopped the server, which drains without its file
    pid = pid_without_file(file) if sys.argv[1] else None
print(pid) if pid else sys.exit(1)'

set -f # nothing here looks for file names; what is run in the end does as it likes
if [ $# -eq 1 ]; then
  line=$(printf '%s\n' "$1" | sed 's/\\$//' | tr '\n' ' ') # its lines are one; each of them by itself would be run here
  case $line in
    *[\;\&\|\`\<\>\(\)]*) stay sh -c "$1" ;;
  esac
else
  for word; do
    case $word in
      '&' | '&&' | '|' | '||' | ';' | '>' | '>>' | '<' | '2>&1') stay sh -c "$*" ;;
    esac
  done
  line=${1-}
  case ${line##*/} in # its last word is a line of its own, and no other word is for the shell
    sh | bash) case ${2-} in -c | -[a-z]c | -[a-z][a-z]c) stay "$@" ;; esac ;;
  esac
  # A program alone in the first word reads the others itself, as Python with -c; a line with the server is cut anywhere.
  cut=1
  case $line in *[[:blank:]\;\&\|\`\<\>\(\)]* | serve) ;; *) case $* in *torchserve*) ;; *) cut='' ;; esac ;; esac
  for word; do
    case ${cut:+$word} in *[[:blank:]]*[\;\&\|\`\<\>\(\)]* | *[\;\&\|\`\<\>\(\)]*[[:blank:]]*) stay sh -c "$*" ;; esac
  done
fi

# The first word of the line says which program reads the rest: the server or a shell.
line=${line#"${line%%[![:space:]]*}"}
case ${line%%[[:space:]]*} in
  torchserve | */torchserve | serve)
    for word; do
      shift
      word=$(printf '%s\n' "$word" | sed 's/\\$//' | tr '\n' ' ')
      word=${word% } # of the last newline
      case $word in
        *[[:space:]]* | *[\$\'\"\\]*) eval "set -- \"\$@\" $word" ;;
        *) set -- "$@" "$word" ;;
      esac
    done
    ;;
  *=* | exec | cd | export | set | eval | source | . | ulimit | umask) stay sh -c "$*" ;;
  *)
    if [ $# -eq 1 ]; then
      case $1 in *[\$\'\"]*) stay sh -c "$1" ;; esac
      # shellcheck disable=SC2086 # words separated by blanks
      set -- $1
    fi
    ;;
esac

# SageMaker starts its containers with `serve`, and puts models below /opt/ml.
base=${SAGEMAKER_BASE_DIR:-/opt/ml}
if [ "$*" = serve ] && { [ -d "$base/model" ] || [ -d "$base/models" ]; }; then
  exec torchere sagemaker
fi

if [ $# -eq 0 ] || [ "$1" = serve ]; then
  [ $# -eq 0 ] || shift
  export TORCHERE_LOG_FORMAT="${TORCHERE_LOG_FORMAT:-auto}" # JSON lines; `torchserve` has TorchServe's
  set -- torchserve --start --ts-config "$home/config.properties" "$@"
fi

if [ "${1##*/}" = torchserve ]; then
  case " $* " in
    *' --foreground '* | *' --stop '* | *' -v '* | *' --version '* | *' -h '* | *' --help '*) ;;
    *) shift && set -- torchserve --foreground "$@" ;;
  esac
fi

case ${1##*/} in torchserve | torchere) exec "$@" ;; esac
stay "$@"
