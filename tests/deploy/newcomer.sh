#!/bin/sh
# What a newcomer does, in a clean container without a checkout and without a network:
#
#   docker run --rm --tty --network none --shm-size=1g --volume DIR:/wheels:ro --volume tests:/opt/hub/tests:ro \
#     --entrypoint sh IMAGE /opt/hub/tests/deploy/newcomer.sh
#
# IMAGE has Python, at least 3.11, with venv. DIR has the wheel, and those of all its dependencies for that Python. A Hub
# on loopback, which is a test's, has the model. bench/results/newcomer.md has what was seen, and in which image.
set -eu
cd /tmp
begun=$(date +%s)
say() { printf '\n[%3d s] $ %s\n' "$(($(date +%s) - begun))" "$*"; }
run() { say "$@"; "$@"; }

run python3 -m venv twostroke
. twostroke/bin/activate
run pip install --quiet --no-index --find-links /wheels "$(ls /wheels/twostroke-*.whl)"
run du -sh twostroke
run twostroke --version
run twostroke doctor
hub=$(mktemp)
PYTHONPATH=/opt/hub python3 -m tests.support.workers.hub_server \
  "$(echo twostroke/lib/python3*/site-packages/twostroke/deploy/models/tiny-llama)" > "$hub" &
while [ ! -s "$hub" ]; do sleep 0.1; done
HF_ENDPOINT=$(cat "$hub")
export HF_ENDPOINT
say "twostroke serve org/tiny --port 8000 &"
twostroke serve org/tiny --port 8000 &
server=$!
until python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000/ready")' 2> /dev/null; do sleep 0.2; done
run twostroke chat --prompt "What is the capital of France?" --max-tokens 40
run twostroke models
run twostroke bench --num-prompts 20 --request-rate 2,8 --input-len 40 --output-len 30 --save-result /tmp/result.json
run twostroke ctl status
say "Ctrl-C"
kill -INT "$server"
wait "$server" && say "it ended with status 0"
