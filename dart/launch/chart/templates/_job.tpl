{{/* Replicas, or ranks: an Indexed Job, which ends, and frees its GPUs, when the run is finished.

A Job cannot be changed, so its name has a digest of what it consists of: an upgrade that changes it replaces it. */}}
{{- define "dart.job" -}}
{{- $it := merge (dict "name" (printf "%s-%s-%s" .root.Release.Name .role (include "dart.jobDigest" .))) . -}}
apiVersion: batch/v1
kind: Job
metadata:
  {{- include "dart.metadata" $it | nindent 2 }}
spec:
  {{- include "dart.jobSpec" $it | nindent 2 }}
{{- end }}

{{- define "dart.jobDigest" -}}
{{- include "dart.jobSpec" (merge (dict "name" "") .) | sha256sum | trunc 8 }}
{{- end }}

{{- define "dart.jobSpec" -}}
completionMode: Indexed
completions: {{ .of.count }}
parallelism: {{ .of.count }}
backoffLimit: {{ .root.Values.restarts | int64 }}
template:
  metadata:
    labels:
      {{- include "dart.labels" . | nindent 6 }}
    {{- with include "dart.annotations" . | trim }}
    annotations:
      {{- . | nindent 6 }}
    {{- end }}
  spec:
    restartPolicy: OnFailure
    {{- if eq .role "train" }}
    subdomain: {{ .root.Release.Name }}-train
    {{- end }}
    {{- include "dart.pod" . | nindent 4 }}
    containers:
      - {{- include "dart.container" . | nindent 8 }}
        {{- if eq .role "train" }}
        # An upgrade ends ranks and coordinator at once, and the coordinator still wants a checkpoint of them.
        command: [sh, -c, "trap '' TERM; exec dart \"$@\"", dart]
        {{- else }}
        command: [dart]
        {{- end }}
        args:
          {{- include "dart.worker" . | nindent 10 }}
          - --until-finished
          - --id={{ .role }}{{ if eq .role "rollout" }}-$(POD_INDEX){{ end }}
        env:
          - name: {{ eq .role "train" | ternary "RANK" "POD_INDEX" }}
            valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
          {{- if eq .role "train" }}
          - name: LOCAL_RANK
            value: "0"
          - name: LOCAL_WORLD_SIZE
            value: "1"
          - name: WORLD_SIZE
            value: {{ .of.count | quote }}
          - name: MASTER_ADDR # also where replicas fetch weights
            value: {{ .name }}-0.{{ .root.Release.Name }}-train
          - name: MASTER_PORT
            value: "29500"
          {{- end }}
          {{- include "dart.environment" . | nindent 10 }}
        volumeMounts:
          {{- include "dart.mounts" . | nindent 10 }}
          {{- if ne .role "env" }}
          - {name: runs, mountPath: /runs, readOnly: {{ eq .role "rollout" }}}
          {{- end }}
          {{- include "dart.modelMount" . | nindent 10 }}
    volumes:
      {{- include "dart.volumes" . | nindent 6 }}
      {{- if ne .role "env" }}
      - name: runs
        persistentVolumeClaim: {claimName: {{ include "dart.runs" .root }}}
      {{- end }}
      {{- include "dart.modelVolume" . | nindent 6 }}
{{- end }}
