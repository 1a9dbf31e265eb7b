#!/bin/sh
# Stops what start.sh DIR started, by the process ids that it left there.
dir=$1
export SLURM_CONF="$dir/slurm.conf"
scancel --me 2>/dev/null
i=0
while [ -n "$(squeue -h 2>/dev/null)" ] && [ $i -lt 60 ]; do
	i=$((i + 1))
	sleep 0.25
done
for pid in "$dir"/slurmd-*.pid "$dir/slurmctld.pid" "$dir/munge/pid"; do
	[ -s "$pid" ] || continue
	number=$(cat "$pid")
	kill "$number" 2>/dev/null && sleep 0.5
	kill -9 "$number" 2>/dev/null # munged at times waits for a client that is gone
done
exit 0
