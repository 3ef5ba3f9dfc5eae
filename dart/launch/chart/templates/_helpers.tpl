{{- define "dart.labels" -}}
app.kubernetes.io/name: dart
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "dart.metadata" -}}
name: {{ .name | default (printf "%s-%s" .root.Release.Name .role) }}
labels:
  {{- include "dart.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "dart.tokens" -}}{{ .Values.tokens.secret | default (printf "%s-tokens" .Release.Name) }}{{- end }}

{{- define "dart.tls" -}}{{ .Values.tls.secret | default (printf "%s-tls" .Release.Name) }}{{- end }}

{{- define "dart.runs" -}}{{ .Values.runs.claim | default (printf "%s-runs" .Release.Name) }}{{- end }}

{{/* The names under which the coordinator is reached, and the one that it binds. */}}
{{- define "dart.names" -}}
{{- $service := printf "%s-coordinator" .Release.Name -}}
{{- list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s-0" $service) | toJson -}}
{{- end }}

{{/* What all pods of a role share, within their spec. Arguments: root, role, of (its values), image. */}}
{{- define "dart.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true # its first process reaps what browsers leave behind
terminationGracePeriodSeconds: {{ .of.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.user }}
  runAsGroup: {{ .root.Values.user }}
  fsGroup: {{ .root.Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.of $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The annotations of a role's pods: another set of files restarts them. Empty if there are none. */}}
{{- define "dart.annotations" -}}
{{- with .root.Values.files }}
dart/files: {{ toJson . | sha256sum }}
{{- end }}
{{- with .of.annotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "dart.filesMount" -}}
{{- if .root.Values.files }}
- {name: files, mountPath: /etc/dart/files, readOnly: true}
{{- end }}
{{- end }}

{{- define "dart.filesVolume" -}}
{{- if .root.Values.files }}
- name: files
  configMap: {name: {{ .root.Release.Name }}-files}
{{- end }}
{{- end }}

{{/* What all containers share. */}}
{{- define "dart.container" -}}
name: {{ .role }}
{{- if .root.Values.files }}
workingDir: /etc/dart/files # where modules are found
{{- end }}
image: {{ .image | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources:
  requests:
    cpu: {{ .of.cpus | quote }}
    {{- if .of.memoryGb }}
    memory: {{ .of.memoryGb }}G
    {{- end }}
  {{- if or .of.memoryGb .of.gpus }}
  limits:
    {{- if .of.memoryGb }}
    memory: {{ .of.memoryGb }}G
    {{- end }}
    {{- if .of.gpus }}
    nvidia.com/gpu: {{ .of.gpus | quote }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* A worker's token and environment. */}}
{{- define "dart.environment" -}}
- name: HOME
  value: /tmp
- name: DART_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "dart.tokens" .root }}, key: {{ .role }}.token}}
{{- range $name, $value := .of.environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "dart.worker" -}}
- worker
- --role={{ .role }}
- --coordinator={{ .root.Release.Name }}-coordinator:50051
- --tls-ca=/etc/dart/ca/ca.crt
{{- end }}

{{/* Where a worker may write, and whom it trusts. */}}
{{- define "dart.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: ca, mountPath: /etc/dart/ca, readOnly: true}
{{- include "dart.filesMount" . }}
{{- end }}

{{- define "dart.volumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .of.shmGb }}G}
- name: ca
  secret:
    secretName: {{ include "dart.tls" .root }}
    items: [{key: ca.crt, path: ca.crt}]
{{- include "dart.filesVolume" . }}
{{- end }}

{{- define "dart.modelMount" -}}
{{- if .root.Values.model.claim }}
- {name: model, mountPath: {{ .root.Values.model.folder | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "dart.modelVolume" -}}
{{- if .root.Values.model.claim }}
- name: model
  persistentVolumeClaim: {claimName: {{ .root.Values.model.claim }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "dart.probe" -}}
exec:
  command: [dart, health, {{ .Release.Name }}-coordinator-0:50051, --tls-ca=/etc/dart/tls/ca.crt]
timeoutSeconds: 15
{{- end }}
