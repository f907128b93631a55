#!/usr/bin/env bash
# Builds the image without a registry of images and without Docker, and starts it as strict platforms do. The base is
# made of Debian's packages, with the same Python as the real one; pip has this machine's configuration. Needs root, and
# buildah, podman, runc and debootstrap:
#
#   apt-get install -y --no-install-recommends buildah podman runc catatonit debootstrap
#   make image        # 5 to 10 minutes and 4 GB; it leaves the images torchere-base and torchere:try behind
#
# The container has a read-only root, a random user of group 0, no capabilities and TS_TRACING=true; the second time TLS.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
container=torchere-try-$$
suite=bookworm
base=localhost/torchere-base
image=localhost/torchere:try

missing=()
for tool in buildah podman runc debootstrap; do command -v "$tool" > /dev/null || missing+=("$tool"); done
if [ "$(id -u)" -ne 0 ] || [ ${#missing[@]} -gt 0 ]; then
  echo "not tried: it needs root, and ${missing[*]:-nothing else}; see the head of deploy/try_image.sh" >&2
  exit 2
fi

# podman without systemd and without crun, which knows no hybrid control groups; limits that a small machine allows.
export CONTAINERS_CONF=$work/containers.conf
cat > "$CONTAINERS_CONF" << 'EOF'
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
EOF

clean() {
  podman rm --force --time 5 "$container" > /dev/null 2>&1 || true
  rm -rf --one-file-system "$work"
}
trap clean EXIT

make_base() {
  local mirror mounted made
  ! buildah inspect --type image "$base" > /dev/null 2>&1 || return 0 # of an earlier run
  mirror=${DEBIAN_MIRROR:-$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2> /dev/null || true)}
  [ -n "$mirror" ] || { echo "found no Debian mirror of this machine: set DEBIAN_MIRROR=URL" >&2 && exit 1; }
  # In its own mount namespace: if it is stopped early, /proc must not stay mounted in a folder that is removed next.
  unshare --mount debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$work/base" "$mirror" > "$work/debootstrap.log" \
    || { tail -5 "$work/debootstrap.log" >&2 && exit 1; }
  ln -s /usr/bin/python3 "$work/base/usr/local/bin/python"
  # The certificate authorities of this machine, which its mirrors of Debian and of packages may need.
  cp /etc/ssl/certs/ca-certificates.crt "$work/base/etc/ssl/certs/ca-certificates.crt"
  made=$(buildah from scratch)
  mounted=$(buildah mount "$made")
  cp -a "$work/base/." "$mounted/"
  buildah umount "$made" > /dev/null
  buildah commit --quiet --rm "$made" "$base" > /dev/null
}

# mounts: pip's configuration of this machine as a file, and options that show it and the folders it names to the build
mounts() {
  local value
  python3 -m pip config list | sed -n "s/^\(global\|:env:\)\.\([a-z-]*\)='\(.*\)'$/\2 = \3/p" \
    | awk -F ' = ' '!seen[$1]++' > "$work/pip.options"
  { echo '[global]' && cat "$work/pip.options"; } > "$work/pip.conf"
  echo --volume "$work/pip.conf:/etc/pip.conf:ro"
  sed 's/^[^=]*= //' "$work/pip.options" | tr ' ' '\n' | sort -u | while read -r value; do
    case $value in
      file://*) value=$(dirname "${value#file://}") ;; # an index in a folder has its files beside it
      /etc/ssl/*) continue ;;
    esac
    case $value in
      /*) [ ! -e "$value" ] || echo --volume "$(realpath "$value"):$value:ro" ;;
    esac
  done
}

build() {
  local options
  mapfile -t options < <(mounts | tr ' ' '\n')
  podman image rm --force "$image" > /dev/null 2>&1 || true # of an earlier run: it would stay without a name
  buildah bud --isolation chroot --format docker --pull-never --network host "${options[@]}" \
    --build-arg BASE="$base" --file "$root/deploy/Dockerfile" \
    --ignorefile "$root/deploy/Dockerfile.dockerignore" --tag "$image" "$root" > "$work/build.log" 2>&1 \
    || { tail -30 "$work/build.log" >&2 && exit 1; }
}

# start NAME=VALUE ...: run the image with these variables, and wait until its health check passes and it is ready
start() {
  local variables=() user began
  for each; do variables+=(--env "$each"); done
  user=$((RANDOM + 100000))
  began=$SECONDS
  podman run --detach --name "$container" --network none --no-healthcheck --read-only --cap-drop all \
    --security-opt no-new-privileges --user "$user:0" \
    --tmpfs /tmp:exec,mode=1777 --tmpfs /home/model-server/tmp:exec,mode=1777 --tmpfs /home/model-server/logs:mode=1777 \
    --volume "$work/tls:/tls:ro" --env TS_TRACING=true --env TS_KEY_FILE=/tmp/key_file.json "${variables[@]}" "$image" \
    > /dev/null
  until podman exec "$container" python /usr/local/lib/torchere/healthcheck.py; do
    if [ "$(podman inspect --format '{{.State.Running}}' "$container")" != true ] || [ $((SECONDS - began)) -gt 120 ]; then
      podman logs "$container" >&2
      echo "the container of user $user does not get healthy" >&2
      exit 1
    fi
    sleep 0.5
  done
  echo "healthy after $((SECONDS - began)) s as user $user: $*"
}

stop() {
  podman stop --time 60 "$container" > /dev/null
  local status
  status=$(podman inspect --format '{{.State.ExitCode}}' "$container")
  podman rm "$container" > /dev/null
  [ "$status" -eq 0 ] || { echo "exit status $status after SIGTERM" >&2 && exit 1; }
}

echo "==> base, of Debian's packages" && make_base
echo "==> image" && build
echo "==> start"
mkdir "$work/tls"
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout "$work/tls/key.pem" \
  -out "$work/tls/cert.pem" 2> "$work/openssl.log"
chmod 0755 "$work" "$work/tls" && chown 0:0 "$work/tls/key.pem" && chmod 0640 "$work/tls/key.pem"
start
# The extras are there, and no start compiles torch again.
podman exec "$container" python -c '
import importlib, pathlib, torch
for name in ("opentelemetry.sdk", "botocore", "tokenizers", "pyseccomp", "torchere.client"):
    importlib.import_module(name)
folder = pathlib.Path(torch.__file__).parent
sources = {path.stem for path in folder.glob("*.py")}
compiled = {path.name.partition(".")[0] for path in (folder / "__pycache__").glob("*.pyc")}
assert sources and sources <= compiled, sorted(sources - compiled)
'
podman exec "$container" sh -c '! touch /home/model-server/x 2> /dev/null'
stop
start TS_INFERENCE_ADDRESS=https://0.0.0.0:8080 TS_CERTIFICATE_FILE=/tls/cert.pem TS_PRIVATE_KEY_FILE=/tls/key.pem
stop
echo "==> the image builds, starts and stops"
