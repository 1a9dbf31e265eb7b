#!/bin/sh
# A Slurm of two pretend nodes on loopback under DIR, for tests: its own munge key, no accounting, no cgroups. Needs root
# and Debian's slurm-wlm and munge. Afterwards SLURM_CONF=DIR/slurm.conf and DIR/bin first on PATH. Stop it with stop.sh DIR.
# Jobs of the partition "debug" give way to those of "urgent" and are queued again: they
# have five minutes to save, but lose their place in the queue if they merely end.
set -e
dir=$1
host=$(hostname -s)
cpus=$(nproc)
nodes="0x7f000001 0x7f000002" # 127.0.0.1 and .2 spelt as names: ranks find rank 0 by the name of its node
memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 - 512))
mkdir -p "$dir/munge" "$dir/state" "$dir/spool" "$dir/log" "$dir/bin"
chmod 755 "$dir" "$dir/munge"
(umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
	--log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
cat >"$dir/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=0x7f00000[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[16818-16819] CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$memory State=UNKNOWN
PartitionName=DEFAULT Nodes=0x7f00000[1-2] MaxTime=INFINITE DefMemPerCPU=512 State=UP
PartitionName=debug Default=YES OverSubscribe=FORCE:4 PriorityTier=1 GraceTime=300
PartitionName=urgent OverSubscribe=EXCLUSIVE PriorityTier=2 PreemptMode=OFF
END
# submitit asks sacct for states, which needs a database; this answers the same question from the controller
cat >"$dir/bin/sacct" <<'END'
#!/bin/sh
echo "JobID|State|NodeList"
while [ $# -gt 0 ]; do
	[ "$1" = -j ] && shift && scontrol -o show job "$1" 2>/dev/null |
		sed -n 's/^JobId=\([0-9]*\).* JobState=\([A-Z_]*\).* NodeList=\([^ ]*\).*/\1|\2|\3/p'
	shift
done
END
chmod +x "$dir/bin/sacct"
export SLURM_CONF="$dir/slurm.conf"
slurmctld
for node in $nodes; do
	mkdir -p "$dir/spool/$node"
	slurmd -N "$node"
done
i=0
until [ "$(sinfo -h -N -p debug -o %T 2>/dev/null | grep -cE 'idle|mixed|allocated')" = 2 ]; do
	i=$((i + 1))
	[ $i -lt 80 ] || { echo "Slurm does not come up; see $dir/log" >&2 && exit 1; }
	sleep 0.25
done
