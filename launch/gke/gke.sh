#!/usr/bin/env bash
# Trains on GPU nodes or a TPU slice of GKE, as a JobSet.
#
#   launch/gke/gke.sh [options] -- --config=FILE --workdir=/workdir/DIR [flags of structinit_jax.main]
#
#   --name=NAME        name of the JobSet (default: structinit-jax)
#   --image=IMAGE      container image, built with launch/gke/Dockerfile
#   --claim=CLAIM      ReadWriteMany volume claim for /workdir, such as Filestore (default: workdir)
#   --nodes=N          number of nodes (default: 1)
#   --gpus=N           GPUs per node (default: 8)
#   --accelerator=A    node label (default: nvidia-h100-80gb)
#   --tpu=TYPE:AxB     use a TPU slice instead: v4, v5e, v5p or v6e and its topology, such as v5e:4x4
#   --spot             use spot nodes: cheaper, but may be preempted at any time
#   --logs             follow the first pod's output
#   --delete           stop the run, which can be resumed, and delete the JobSet
#   --dry_run          print the commands without running them
#   --help             print this text
#
# Repeating the command does nothing while a run with the same settings is in progress. After the run has
# ended, or to change its settings, pass --delete first. Requires JobSet (https://jobset.sigs.k8s.io).

set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=launch/common.sh
source launch/common.sh

name=structinit-jax image='' claim=workdir nodes=1 gpus=8 accelerator=nvidia-h100-80gb tpu='' spot=false
action=apply
while (($#)); do
  case $1 in
    --name=*) name=$(value_of "$1") ;;
    --image=*) image=$(value_of "$1") ;;
    --claim=*) claim=$(value_of "$1") ;;
    --nodes=*) nodes=$(value_of "$1") ;;
    --gpus=*) gpus=$(value_of "$1") ;;
    --accelerator=*) accelerator=$(value_of "$1") ;;
    --tpu=*) tpu=$(value_of "$1") ;;
    --spot) spot=true ;;
    --logs) action=logs ;;
    --delete) action=delete ;;
    --dry_run) dry_run=true ;;
    --help) show_help; exit ;;
    --) shift; break ;;
    *) unknown_option "$1" ;;
  esac
  shift
done
need kubectl "see https://kubernetes.io/docs/tasks/tools"

# Prints the JobSet: one pod per host. All pods start together, and restart together after a failure.
manifest() {
  cat << YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "$name"
  annotations: {$annotations}
spec:
  failurePolicy:
    maxRestarts: 100  # after stops with a checkpoint, lost nodes and crashes
    rules:
      - name: mistake
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          parallelism: $nodes
          completions: $nodes
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              # A mistake, or a state that is not finite, would end every restart in the same way.
              - action: FailJob
                onExitCodes: {operator: In, values: [2]}
          template:
            spec:
              restartPolicy: Never
              # Else Python would be process 1, which ignores signals until training handles them.
              shareProcessNamespace: true
              terminationGracePeriodSeconds: 120
              nodeSelector: {$selector}
              tolerations: [$tolerations]
              containers:
                - name: train
                  image: "$image"
                  # exec lets the signal of an eviction reach the program.
                  command: [bash, -c, 'exec $program "\$@"', train]
                  args:
$arguments                  # Without a working accelerator the run fails instead of using the CPU.
                  env: [$environment]
                  ports:
                    - containerPort: 8471  # TPU runtime
                    - containerPort: 8476  # coordinator
                  resources:
                    limits: {$limits}
                  volumeMounts:
                    - {name: workdir, mountPath: /workdir}
                    - {name: shared-memory, mountPath: /dev/shm}
              volumes:
                - name: workdir
                  persistentVolumeClaim: {claimName: "$claim"}
                - name: shared-memory
                  emptyDir: {medium: Memory}
YAML
}

case $action in
  logs)
    run kubectl logs --follow --selector="jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete) run kubectl delete jobset "$name" --ignore-not-found --cascade=foreground ;; # after the pods
  apply)
    [[ -n $image ]] || fail "--image=IMAGE is required: a container image with structinit_jax installed"
    need_flags "$@"
    arguments=''
    for argument in "$@"; do # as single-quoted YAML strings
      arguments+="                    - '${argument//\'/\'\'}'"$'\n'
    done
    annotations='' program='python -m structinit_jax.main' tolerations=''
    if [[ -n $tpu ]]; then
      [[ $tpu =~ ^(v4|v5e|v5p|v6e):[0-9]+(x[0-9]+){1,2}$ ]] ||
        fail "--tpu=$tpu must be v4, v5e, v5p or v6e and a topology, such as v5e:4x4"
      topology=${tpu#*:}
      case ${tpu%%:*} in
        v4) accelerator='tpu-v4-podslice' ;;
        v5e) accelerator='tpu-v5-lite-podslice' ;;
        v5p) accelerator='tpu-v5p-slice' ;;
        v6e) accelerator='tpu-v6e-slice' ;;
      esac
      chips=$((${topology//x/*}))
      # Hosts have four chips; small v5e and v6e slices are a single host with up to eight chips.
      if ((chips <= 4)) || { ((chips == 8)) && [[ $tpu == v[56]e:* ]]; }; then
        nodes=1
      else
        nodes=$((chips / 4)) chips=4 program+=' --join_timeout=86400' # until all pods have a node
      fi
      # All pods in one node pool, which is one slice. They find each other by GKE's variables.
      annotations='alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool'
      selector="cloud.google.com/gke-tpu-accelerator: $accelerator, "
      selector+="cloud.google.com/gke-tpu-topology: '$topology'"
      limits="google.com/tpu: $chips"
      environment='{name: JAX_PLATFORMS, value: "tpu,cpu"}'
    else
      selector="cloud.google.com/gke-accelerator: $accelerator"
      limits="nvidia.com/gpu: $gpus"
      # GKE mounts the driver in /usr/local/nvidia/lib64, which the loader does not search.
      environment='{name: JAX_PLATFORMS, value: "cuda,cpu"}'
      environment+=', {name: LD_LIBRARY_PATH, value: /usr/local/nvidia/lib64}'
      program="launch/local.sh --processes=$gpus"
      if ((nodes > 1)); then
        # shellcheck disable=SC2016 # expands in the pod
        program+=" --machines=$nodes"' --machine="$JOB_COMPLETION_INDEX"'
        program+=" --coordinator=$name-workers-0-0.$name:8476"
      fi
      program+=' -- --join_timeout=86400' # until all pods have a node
    fi
    if $spot; then
      selector+=', cloud.google.com/gke-spot: "true"'
      tolerations='{key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}'
    fi
    run kubectl apply --filename=- <<< "$(manifest)"
    if $dry_run; then
      manifest
    fi
    ;;
esac
