#!/usr/bin/env bash
# Serve: ./launch.sh [options of "cbdisagg serve"], as ./launch.sh --config configs/colocated.toml --port 9000
# The first start installs what is needed into .venv, which takes minutes; later ones begin at once.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup-env.sh"
prepare_environment ""
exec "$PYTHON" -m cbdisagg serve "$@"
